//! SplitMix64, ten lines of our own, so that no crate update ever changes what a seed means; and what a seed draws.

pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed ^ 0x5DEE_CE66D)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// `lo <= n < hi`
    pub fn range(&mut self, lo: u64, hi: u64) -> u64 {
        lo + self.next() % (hi - lo)
    }

    pub fn permille(&mut self, chance: u64) -> bool {
        self.next() % 1000 < chance
    }
}

/// How often each fault strikes, per mille. Each seed draws its own mix, some faults wholly off.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Of a connection.
    pub refuse: u64,
    pub syn_lost: u64,
    pub cut_request: u64,
    pub cut_answer: u64,
    pub mute_answer: u64,
    /// The request is delivered once more, later, on a connection of its own.
    pub twice: u64,
    /// Of a write, a look-up, a ledger call.
    pub slow: u64,
    /// Of a host's life: all its futures are dropped at some poll; it stands still for a while at some poll.
    pub kill: u64,
    pub freeze: u64,
    /// Of a ledger call: nothing was done; it was done and the answer is lost.
    pub ledger_not_done: u64,
    pub ledger_answer_lost: u64,
    /// Of an answer of that party.
    pub seller_lies: u64,
    pub signer_fails: u64,
    pub catalog_fails: u64,
    /// A node hides a used nonce, is ahead of the chain, alters a simulation, submits what it simulated.
    pub node_hides: u64,
    pub node_ahead: u64,
    pub node_alters: u64,
    pub node_submits: u64,
    /// Of an attempt: the agent goes away before the answer; asks two processes at once.
    pub agent_leaves: u64,
    pub agent_races: u64,
    pub gate: GateFaults,
}

/// What else strikes where a gate sells.
#[derive(Clone, Debug, Default)]
pub struct GateFaults {
    /// Of an answer of the facilitator to `/settle`, to anything else.
    pub settle_lies: u64,
    pub facilitator_fails: u64,
    /// Of a run of a handler.
    pub handler_fails: u64,
    pub handler_slow: u64,
    pub handler_hangs: u64,
    pub handler_large: u64,
    /// Of a payment: its nonce is spent on another call, it is tried for another call too, its twin brings no proof.
    pub spent_elsewhere: u64,
    pub swapped: u64,
    pub unproven: u64,
    /// Of a transfer on the chain, at each look at it: somebody presents it as his payment.
    pub thieves: u64,
}

impl GateFaults {
    pub fn draw(rng: &mut Rng) -> GateFaults {
        let mut up_to = |most: u64| if rng.permille(400) { 0 } else { rng.range(1, most) };
        GateFaults {
            settle_lies: up_to(700),
            facilitator_fails: up_to(200),
            handler_fails: up_to(700),
            handler_slow: up_to(400),
            handler_hangs: up_to(150),
            handler_large: up_to(200),
            spent_elsewhere: up_to(250),
            swapped: up_to(300),
            unproven: up_to(400),
            thieves: up_to(150),
        }
    }
}

impl Faults {
    pub fn draw(rng: &mut Rng) -> Faults {
        let mut up_to = |most: u64| if rng.permille(400) { 0 } else { rng.range(1, most) };
        Faults {
            refuse: up_to(60),
            syn_lost: up_to(30),
            cut_request: up_to(50),
            cut_answer: up_to(80),
            mute_answer: up_to(60),
            twice: up_to(120),
            slow: up_to(60),
            kill: up_to(900),
            freeze: up_to(500),
            ledger_not_done: up_to(30),
            ledger_answer_lost: up_to(40),
            seller_lies: up_to(600),
            signer_fails: up_to(200),
            catalog_fails: up_to(100),
            node_hides: up_to(500),
            node_ahead: up_to(300),
            node_alters: up_to(100),
            node_submits: up_to(100),
            agent_leaves: up_to(300),
            agent_races: up_to(300),
            gate: GateFaults::default(),
        }
    }
}
