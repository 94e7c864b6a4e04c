//! The network's promises. Everything runs on the real host.

mod scene;

use stellar_xdr::{
    ContractDataDurability, LedgerBounds, LedgerKey, LedgerKeyContractData, OperationBody, Preconditions,
    PreconditionsV2, ScAddress, ScNonceKey, ScVal, SorobanCredentials, TimeBounds, TimePoint, Transaction,
    TransactionEnvelope, TransactionExt,
};

use super::*;
pub(in crate::sandbox) use scene::*;

fn nonce_key(payer: ScAddress, nonce: i64) -> LedgerKey {
    LedgerKey::ContractData(LedgerKeyContractData {
        contract: payer,
        key: ScVal::LedgerKeyNonce(ScNonceKey { nonce }),
        durability: ContractDataDurability::Temporary,
    })
}

fn refusal(admission: Admission) -> String {
    match admission {
        Admission::Refused(result) => format!("{result:?}"),
        other => format!("{other:?}"),
    }
}

#[tokio::test]
async fn its_asset_has_the_address_that_everybody_knows() {
    let scene = scene(options());
    assert_eq!(lock(scene.chain()).contract.to_string(), USDC);
}

#[tokio::test]
async fn accounts_follow_the_seed_and_their_secrets_stay_out_of_logs() {
    let (one, two) = (scene(options()), scene(options()));
    assert_eq!(one.payer.address(), two.payer.address());
    assert_ne!(one.payer.address(), one.shop.address());
    let random = scene(Options { seed: None, ..options() });
    assert_ne!(random.payer.address(), one.payer.address());
    assert!(one.payer.address().starts_with('G') && one.payer.secret().starts_with('S'));
    let secret = stellar_strkey::ed25519::PrivateKey::from_string(&one.payer.secret()).unwrap();
    assert_eq!(secret.0, one.payer.key.to_bytes());
    assert_eq!(format!("{:?}", one.payer), format!("Account({})", one.payer.address()));
}

#[tokio::test]
async fn options_that_no_network_can_have_are_refused() {
    let world = crate::ports::machine::world().0;
    for wrong in [
        Options { ledger_interval: Some(Duration::from_millis(49)), ..options() },
        Options { retention: 0, ..options() },
        Options { min_temporary_ttl: 0, ..options() },
    ] {
        assert!(LocalNetwork::start(wrong, world.clone()).is_err());
    }
}

#[tokio::test]
async fn an_honest_payment_moves_the_money_and_leaves_its_nonce() {
    for (nonce, arm) in [(5, Arm::Address), (6, Arm::AddressV2)] {
        let scene = scene(options());
        let expiration = scene.network.latest().sequence + 12;
        let entry = sign(scene.entry(AMOUNT, nonce, expiration, arm), &scene.payer, PASSPHRASE);
        let data = scene.data(&entry).unwrap();
        assert!(data.resource_fee < 50_000, "the official facilitator's cap");
        let end = scene.settle(envelope(scene.transaction(&entry, &data), &scene.fees));
        assert!(end.success, "{arm:?}: {}", end.error);
        assert_eq!(scene.balances(), (START - AMOUNT, AMOUNT));
        let transfer = Transfer {
            payer: scene.payer.address(),
            pay_to: scene.shop.address(),
            amount: i128::from(AMOUNT),
            transaction: hex::encode(end.hash),
            ledger: scene.network.latest().sequence,
            nonce: Some(nonce),
        };
        assert_eq!(scene.network.transfers(), [transfer]);
    }
}

#[tokio::test]
async fn one_arms_signature_is_none_for_the_other() {
    let scene = scene(options());
    let expiration = scene.network.latest().sequence + 12;
    let old = sign(scene.entry(AMOUNT, 5, expiration, Arm::Address), &scene.payer, PASSPHRASE);
    let data = scene.data(&old).unwrap();
    let SorobanCredentials::Address(credentials) = old.credentials.clone() else { panic!() };
    let mut crossed = old;
    crossed.credentials = SorobanCredentials::AddressV2(credentials);
    let end = scene.settle(envelope(scene.transaction(&crossed, &data), &scene.fees));
    assert!(!end.success && end.error.contains("Auth"), "{}", end.error);
    assert_eq!(scene.balances(), (START, 0));
}

#[tokio::test]
async fn what_the_payer_did_not_sign_moves_nothing() {
    let scene = scene(options());
    let thief = scene.network.account("thief");
    let latest = scene.network.latest().sequence;
    let unsigned = || scene.entry(AMOUNT, 5, latest + 50, Arm::Address);
    let honest = sign(unsigned(), &scene.payer, PASSPHRASE);
    let data = scene.data(&honest).unwrap();
    let dearer = scene.entry(2 * AMOUNT, 5, latest + 50, Arm::Address);
    let mut other_amount = honest.clone();
    other_amount.root_invocation = dearer.root_invocation;
    let expired = sign(scene.entry(AMOUNT, 5, latest, Arm::Address), &scene.payer, PASSPHRASE);
    for (what, entry, word) in [
        ("forged key", sign(unsigned(), &thief, PASSPHRASE), "Auth, InvalidAction"),
        ("wrong network", sign(unsigned(), &scene.payer, "another network"), "Auth, InvalidAction"),
        ("unsigned", unsigned(), "Auth, InvalidAction"),
        ("another amount", other_amount, "Auth, InvalidAction"),
        ("expired", expired, "Auth, InvalidInput"),
    ] {
        // Simulation says so before any ledger does; but for the expired one, whose last ledger is the newest.
        if what != "expired" {
            assert!(scene.data(&entry).is_err(), "{what}");
        }
        let end = scene.settle(envelope(scene.transaction(&entry, &data), &scene.fees));
        assert!(!end.success && end.error.contains(word), "{what}: {}", end.error);
        assert_eq!(scene.balances(), (START, 0), "{what}");
    }
    // None of the failures used the nonce.
    let end = scene.settle(envelope(scene.transaction(&honest, &data), &scene.fees));
    assert!(end.success, "{}", end.error);
    assert_eq!(scene.network.transfers().len(), 1);
}

#[tokio::test]
async fn an_authorization_is_good_in_its_last_ledger_and_not_in_the_next() {
    for (ledgers, good) in [(2, true), (1, false)] {
        let scene = scene(options());
        let entry = scene.signed(AMOUNT, 5, ledgers);
        let data = scene.data(&entry).unwrap();
        scene.close(1);
        let end = scene.settle(envelope(scene.transaction(&entry, &data), &scene.fees));
        assert_eq!(end.success, good, "{}", end.error);
    }
}

#[tokio::test]
async fn a_replay_fails_before_and_after_the_expiration() {
    let scene = scene(options());
    let entry = scene.signed(AMOUNT, 5, 12);
    let data = scene.data(&entry).unwrap();
    assert!(scene.settle(envelope(scene.transaction(&entry, &data), &scene.fees)).success);
    let again = scene.settle(envelope(scene.transaction(&entry, &data), &scene.fees));
    assert!(!again.success && again.error.contains("ExistingValue"), "{}", again.error);
    scene.close(20);
    let late = scene.settle(envelope(scene.transaction(&entry, &data), &scene.fees));
    assert!(!late.success && late.error.contains("InvalidInput"), "{}", late.error);
    assert_eq!(scene.balances(), (START - AMOUNT, AMOUNT));
}

#[tokio::test]
async fn a_used_nonce_lives_as_long_as_the_rule_says() {
    // (minimum life, ledgers to the expiration, ledgers that the entry is seen after its use)
    for (minimum, expires, lives) in [(10, 3, 9), (3, 20, 19)] {
        let scene = scene(Options { min_temporary_ttl: minimum, ..options() });
        let entry = scene.signed(AMOUNT, 5, expires);
        let data = scene.data(&entry).unwrap();
        assert!(scene.settle(envelope(scene.transaction(&entry, &data), &scene.fees)).success);
        let used = scene.network.latest().sequence;
        let key = nonce_key(address(&scene.payer), 5);
        let live_until = lock(scene.chain()).store.get(&key).unwrap().live_until.unwrap();
        assert_eq!(live_until, (used - 1 + expires).max(used + minimum - 1));
        assert_eq!(live_until, used + lives);
        scene.close(lives);
        assert_eq!(lock(scene.chain()).store.get(&key).unwrap().entry.last_modified_ledger_seq, used);
        scene.close(1);
        assert!(lock(scene.chain()).store.get(&key).is_none());
        // A node that is behind still sees it.
        let chain = lock(scene.chain());
        assert!(chain.stored(&key, chain.seq - 1).is_some() && chain.stored(&key, used - 1).is_none());
    }
}

#[tokio::test]
async fn a_payment_that_cannot_be_made_moves_nothing() {
    let scene = scene(options());
    let entry = scene.signed(AMOUNT, 5, 50);
    let data = scene.data(&entry).unwrap();
    scene.network.trust(&scene.payer.id(), AMOUNT - 1);
    assert!(scene.data(&entry).is_err());
    let end = scene.settle(envelope(scene.transaction(&entry, &data), &scene.fees));
    assert!(!end.success, "more than the balance");
    assert_eq!(scene.balances(), (AMOUNT - 1, 0));

    // A shop that never took a trustline, in a scene of its own.
    let network = LocalNetwork::start(options(), crate::ports::machine::world().0).unwrap();
    let [payer, shop, fees] = ["payer", "shop", "fees"].map(|name| network.account(name));
    network.fund(&payer.id(), 100_000_000);
    network.fund(&fees.id(), 100_000_000);
    network.trust(&payer.id(), START);
    let scene = Scene { network, payer, shop, fees };
    let entry = scene.signed(AMOUNT, 5, 50);
    let refusal = scene.data(&entry).unwrap_err();
    // The asset contract's own code for a missing trustline.
    assert!(refusal.contains("Error(Contract, #13)"), "{refusal}");
}

#[tokio::test]
async fn many_transactions_share_a_ledger_and_money_is_conserved() {
    let scene = scene(options());
    let mut hashes = Vec::new();
    for n in 0..20 {
        let source = scene.network.account(&format!("channel {n}"));
        scene.network.fund(&source.id(), 100_000_000);
        let entry = scene.signed(AMOUNT + n, 100 + n, 50);
        let data = scene.data(&entry).unwrap();
        let envelope = envelope(scene.transaction_from(&source, &entry, &data), &source);
        hashes.push(scene.hash(&envelope));
        assert_eq!(scene.send(envelope), Admission::Pending);
    }
    assert!(scene.end(hashes[0]).is_none(), "nothing is known of it until a ledger closes");
    assert_eq!(scene.balances(), (START, 0));
    let closed = scene.network.close_now();
    let chain = lock(scene.chain());
    for (place, hash) in hashes.iter().enumerate() {
        let (ledger, at, included) = chain.transaction(hash, chain.seq).unwrap();
        assert_eq!((ledger.seq, at, included.success), (closed.sequence, place, true), "{:?}", included.error);
    }
    drop(chain);
    let moved: i64 = (0..20).map(|n| AMOUNT + n).sum();
    assert_eq!(scene.balances(), (START - moved, moved));
    assert_eq!(scene.network.transfers().iter().map(|t| t.amount).sum::<i128>(), i128::from(moved));
}

#[tokio::test]
async fn of_two_transactions_with_one_authorization_one_wins() {
    let scene = scene(options());
    let entry = scene.signed(AMOUNT, 5, 50);
    let data = scene.data(&entry).unwrap();
    let mut ends = Vec::new();
    for name in ["one", "two"] {
        let source = scene.network.account(name);
        scene.network.fund(&source.id(), 100_000_000);
        let envelope = envelope(scene.transaction_from(&source, &entry, &data), &source);
        ends.push(scene.hash(&envelope));
        assert_eq!(scene.send(envelope), Admission::Pending);
    }
    scene.close(1);
    let won: Vec<bool> = ends.iter().map(|hash| scene.end(*hash).unwrap().success).collect();
    assert_eq!(won, [true, false]);
    assert_eq!(scene.network.transfers().len(), 1);
}

#[tokio::test]
async fn the_queue_takes_each_transaction_once_and_one_of_each_source() {
    let scene = scene(Options { queue: 2, transactions_per_ledger: 1, ..options() });
    let make = |name: &str, nonce| {
        let source = scene.network.account(name);
        if lock(scene.chain()).account(&source.id()).is_none() {
            scene.network.fund(&source.id(), 100_000_000);
        }
        let entry = scene.signed(AMOUNT, nonce, 50);
        let data = scene.data(&entry).unwrap();
        envelope(scene.transaction_from(&source, &entry, &data), &source)
    };
    let first = make("a", 1);
    assert_eq!(scene.send(first.clone()), Admission::Pending);
    assert_eq!(scene.send(first.clone()), Admission::Duplicate);
    assert_eq!(scene.send(make("a", 2)), Admission::TryAgainLater);
    let second = make("b", 3);
    assert_eq!(scene.send(second.clone()), Admission::Pending);
    assert_eq!(scene.send(make("c", 4)), Admission::TryAgainLater, "full");
    scene.close(1);
    assert!(scene.end(scene.hash(&first)).is_some() && scene.end(scene.hash(&second)).is_none());
    assert_eq!(scene.send(first), Admission::Duplicate, "also when it is in a ledger");
    scene.close(1);
    assert!(scene.end(scene.hash(&second)).unwrap().success);
}

/// A change of the transaction before it is signed, and how the network refuses it then.
type Wrong<'a> = (&'a str, &'a dyn Fn(&mut Transaction), &'a str);

#[tokio::test]
async fn an_envelope_out_of_order_enters_no_ledger() {
    let scene = scene(options());
    let entry = scene.signed(AMOUNT, 5, 50);
    let data = scene.data(&entry).unwrap();
    let latest = scene.network.latest();
    let time = |min, max| Preconditions::Time(TimeBounds { min_time: TimePoint(min), max_time: TimePoint(max) });
    let ledgers = |min_ledger, max_ledger| {
        Preconditions::V2(PreconditionsV2 {
            ledger_bounds: Some(LedgerBounds { min_ledger, max_ledger }),
            ..PreconditionsV2::default()
        })
    };
    let resource = |change: fn(&mut stellar_xdr::SorobanTransactionData)| {
        move |tx: &mut Transaction| {
            if let TransactionExt::V1(data) = &mut tx.ext {
                change(data);
            }
        }
    };
    let ghost = scene.network.account("never funded");
    let wrongs: [Wrong<'_>; 13] = [
        ("too late", &|tx| tx.cond = time(0, latest.closed_at - 1), "TxTooLate"),
        ("too early", &|tx| tx.cond = time(latest.closed_at + 3_600, 0), "TxTooEarly"),
        ("ledger too late", &|tx| tx.cond = ledgers(0, latest.sequence + 1), "TxTooLate"),
        ("ledger too early", &|tx| tx.cond = ledgers(latest.sequence + 2, 0), "TxTooEarly"),
        ("used sequence", &|tx| tx.seq_num.0 -= 1, "TxBadSeq"),
        ("gap in the sequence", &|tx| tx.seq_num.0 += 1, "TxBadSeq"),
        ("fee below the minimum", &|tx| tx.fee -= 1, "TxInsufficientFee"),
        ("fee above the balance", &|tx| tx.fee = 200_000_000, "TxInsufficientBalance"),
        ("resource fee too small", &resource(|data| data.resource_fee = 1), "TxSorobanInvalid"),
        ("negative resource fee", &resource(|data| data.resource_fee = -1), "TxSorobanInvalid"),
        ("too many instructions", &resource(|data| data.resources.instructions = u32::MAX), "TxSorobanInvalid"),
        ("no such source", &|tx| tx.source_account = muxed(&ghost), "TxNoAccount"),
        ("no Soroban data", &|tx| tx.ext = TransactionExt::V0, "TxMalformed"),
    ];
    for (what, change, expected) in wrongs {
        let mut tx = scene.transaction(&entry, &data);
        change(&mut tx);
        let got = refusal(scene.send(envelope(tx, &scene.fees)));
        assert_eq!(got, expected, "{what}");
    }
    let tx = || scene.transaction(&entry, &data);
    assert_eq!(refusal(scene.send(envelope(tx(), &scene.payer))), "TxBadAuth", "signed by somebody else");
    let TransactionEnvelope::Tx(mut twice) = envelope(tx(), &scene.fees) else { panic!() };
    let TransactionEnvelope::Tx(other) = envelope(tx(), &scene.payer) else { panic!() };
    let both = [twice.signatures.to_vec(), other.signatures.to_vec()].concat();
    twice.signatures = both.try_into().unwrap();
    assert_eq!(refusal(scene.send(TransactionEnvelope::Tx(twice))), "TxBadAuthExtra", "a signature too many");
    let mut two = tx();
    two.operations = [two.operations.to_vec(), two.operations.to_vec()].concat().try_into().unwrap();
    assert_eq!(refusal(scene.send(envelope(two, &scene.fees))), "TxMissingOperation");
    let mut classic = tx();
    let mut operation = classic.operations[0].clone();
    operation.body = OperationBody::Inflation;
    classic.operations = vec![operation].try_into().unwrap();
    assert_eq!(refusal(scene.send(envelope(classic, &scene.fees))), "TxNotSupported");
    assert_eq!(scene.send(envelope(tx(), &scene.fees)), Admission::Pending, "as it should be");
}

#[tokio::test]
async fn the_fee_is_taken_whatever_happens_and_what_is_too_much_goes_back() {
    let scene = scene(options());
    let fees = |scene: &Scene| scene.network.native_balance(&scene.fees.id()).unwrap();
    let entry = scene.signed(AMOUNT, 5, 50);
    let mut data = scene.data(&entry).unwrap();
    data.resource_fee += 10_000;
    let before = fees(&scene);
    assert!(scene.settle(envelope(scene.transaction(&entry, &data), &scene.fees)).success);
    let first = before - fees(&scene);
    assert!(first > 100 && first < 100 + data.resource_fee - 10_000, "{first}");
    let before = fees(&scene);
    assert!(!scene.settle(envelope(scene.transaction(&entry, &data), &scene.fees)).success, "the nonce is used");
    assert_eq!(before - fees(&scene), 100 + data.resource_fee, "a failure gets nothing back");
    assert_eq!(scene.network.native_balance(&scene.payer.id()), Some(100_000_000), "the payer pays no fee");
}

#[tokio::test]
async fn a_resource_fee_that_does_not_carry_the_nonce_fails_the_payment() {
    let scene = scene(options());
    let entry = scene.signed(AMOUNT, 5, 50);
    let mut data = scene.data(&entry).unwrap();
    let (spent, _) = {
        let envelope = envelope(scene.transaction(&entry, &data), &scene.fees);
        admission::resource_fees(&lock(scene.chain()), &envelope, &data, 0).unwrap()
    };
    data.resource_fee = spent;
    let end = scene.settle(envelope(scene.transaction(&entry, &data), &scene.fees));
    assert!(!end.success && end.error.contains("resource fee"), "{}", end.error);
    assert_eq!(scene.balances(), (START, 0));
}

#[tokio::test]
async fn a_sponsor_can_bump_the_fee() {
    let scene = scene(options());
    let sponsor = scene.network.account("sponsor");
    scene.network.fund(&sponsor.id(), 100_000_000);
    let entry = scene.signed(AMOUNT, 5, 50);
    let data = scene.data(&entry).unwrap();
    let inner = envelope(scene.transaction(&entry, &data), &scene.fees);
    let fee = data.resource_fee + 200;
    assert_eq!(refusal(scene.send(fee_bump(inner.clone(), &sponsor, fee - 1))), "TxInsufficientFee");
    let TransactionEnvelope::TxFeeBump(mut forged) = fee_bump(inner.clone(), &scene.payer, fee) else { panic!() };
    forged.tx.fee_source = muxed(&sponsor);
    assert_eq!(refusal(scene.send(TransactionEnvelope::TxFeeBump(forged))), "TxBadAuth");
    let end = scene.settle(fee_bump(inner, &sponsor, fee));
    assert!(end.success, "{}", end.error);
    assert_eq!(scene.network.native_balance(&scene.fees.id()), Some(100_000_000));
    assert!(scene.network.native_balance(&sponsor.id()).unwrap() < 100_000_000);
}

#[tokio::test]
async fn what_became_impossible_while_it_waited_is_dropped() {
    let scene = scene(options());
    let entry = scene.signed(AMOUNT, 5, 50);
    let data = scene.data(&entry).unwrap();
    let envelope = envelope(scene.transaction(&entry, &data), &scene.fees);
    let hash = scene.hash(&envelope);
    assert_eq!(scene.send(envelope), Admission::Pending);
    scene.network.fund(&scene.fees.id(), 0);
    scene.close(1);
    assert!(scene.end(hash).is_none());
    assert_eq!(scene.balances(), (START, 0));
}

#[tokio::test]
async fn only_the_retained_ledgers_are_answered_for() {
    let scene = scene(Options { retention: 5, ..options() });
    let paid = scene.pay(AMOUNT, 5);
    assert!(paid.success);
    scene.close(4);
    assert!(scene.end(paid.hash).is_some());
    scene.close(1);
    assert!(scene.end(paid.hash).is_none());
    {
        let chain = lock(scene.chain());
        assert_eq!(chain.oldest(chain.seq), chain.seq - 4);
    }
    // Even when it is not kept any more at all.
    scene.close(ledger::KEPT + 1);
    let chain = lock(scene.chain());
    assert!(chain.ledger(chain.seq - ledger::KEPT).is_none() && chain.ledger(chain.seq - 5).is_some());
    drop(chain);
    assert_eq!(scene.network.transfers().len(), 1, "the audit forgets nothing");
}

#[tokio::test]
async fn close_times_are_the_wall_clocks_and_never_go_back() {
    let scene = scene(options());
    let start = scene.network.latest().closed_at;
    let mut chain = lock(scene.chain());
    chain.close(start + 10);
    chain.close(start + 5);
    chain.close(start + 10);
    let times: Vec<u64> = (0..3).map(|n| chain.ledger(chain.seq - n).unwrap().time).collect();
    assert_eq!(times, [start + 10; 3]);
}

#[tokio::test]
async fn the_timer_closes_ledgers_until_the_network_is_gone() {
    let (world, tasks) = crate::ports::machine::world();
    let fast = Options { ledger_interval: Some(SHORTEST_INTERVAL), ..options() };
    let network = LocalNetwork::start(fast, world).unwrap();
    let start = network.latest().sequence;
    while network.latest().sequence < start + 3 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    drop(network);
    tasks.close();
    tasks.wait().await;
}
