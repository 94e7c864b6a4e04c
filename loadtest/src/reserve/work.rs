//! The calls that are reserved: random identifiers, keys and nonces, as the paid call makes them, admitted by the guard.

use std::str::FromStr;

use serde_json::value::RawValue;
use tollway::catalog::{Kind, Listing, ResourceRef, SellerTransport, Status};
use tollway::guard::{self, Call, Live, Quote, Rules};
use tollway::ledger::{Authorization, Intent, Limit, Subject};
use tollway::money::{AgentId, Amount, PaymentId, Unit};
use tollway::policy::Policy;
use tollway::ports::World;
use tollway::upstream::Endpoint;
use tollway::x402::{Challenge, Offer};

pub const NETWORK: &str = "stellar:pubnet";
pub const ASSET: &str = "CCW67TSZV3SSS2HXMBQ5JFGCKJNXKZM7UQUWUZPUTHXSTZLEO7SJMI75";
pub const PAYER: &str = "GAOH2NR3A3R2VS6TUE6L75A3OMJ4UKJWEHHNL5GIIEQTS5RVZEK5LAP4";
pub const AMOUNT: u64 = 10_000;
const URL: &str = "https://seller.example/mcp";
/// Sessions of each agent.
const SESSIONS: u64 = 4;

pub struct Work {
    world: World,
    agents: u64,
    listing: Listing,
    challenge: Challenge,
    endpoint: Endpoint,
    rules: Rules,
}

/// What makes a row its own; the plain statements of the baseline write the same.
pub struct Draw {
    pub agent: String,
    pub session: String,
    pub key: String,
    pub id: [u8; 32],
    pub id_nonce: [u8; 16],
    pub call_hash: [u8; 32],
    pub nonce: String,
    pub token: [u8; 16],
}

fn parsed<T: FromStr>(text: &str) -> T {
    text.parse().unwrap_or_else(|_| panic!("{text} is well formed"))
}

fn raw(text: &str) -> Box<RawValue> {
    RawValue::from_string(text.to_owned()).expect("JSON")
}

impl Work {
    pub fn new(world: &World, agents: u64) -> Work {
        let offer = Offer {
            raw: raw("{}"),
            scheme: "exact".to_owned(),
            network: parsed(NETWORK),
            amount: Amount::from_u64(AMOUNT),
            asset: parsed(ASSET),
            pay_to: PAYER.to_owned(),
            max_timeout_seconds: 60,
            extra: Some(raw(r#"{"areFeesSponsored":true}"#)),
        };
        let reference = ResourceRef { kind: Kind::Mcp, url: URL.to_owned(), tool_name: Some("tool".to_owned()) };
        Work {
            world: world.clone(),
            agents,
            listing: Listing {
                raw: raw("{}"),
                reference,
                version_hash: "ab".repeat(32),
                transport: SellerTransport::StreamableHttp,
                input_schema: None,
                offers: vec![offer.clone()],
                status: Status::Active,
                warnings: Vec::new(),
            },
            challenge: Challenge {
                raw: raw("{}"),
                error: None,
                resource_url: URL.to_owned(),
                resource: raw("{}"),
                offers: vec![offer],
                extensions: None,
            },
            endpoint: Endpoint { url: parsed(URL), transport: SellerTransport::StreamableHttp },
            rules: Rules { payable: [parsed(NETWORK)].into() },
        }
    }

    /// For callers in tasks of their own.
    pub fn again(&self) -> Work {
        Work::new(&self.world, self.agents)
    }

    pub fn draw(&self) -> Draw {
        let random: [u8; 96] = self.world.random();
        let at = |from: usize| u64::from_be_bytes(std::array::from_fn(|i| random[from + i]));
        let agent = format!("agent-{:05}", at(0) % self.agents);
        let (session, key) = (format!("{agent}/s{}", at(8) % SESSIONS), format!("{:016x}{:016x}", at(16), at(24)));
        let id = std::array::from_fn(|i| random[32 + i]);
        // One way to spread 32 bytes over two columns is as good as another: only that they are random counts.
        let call_hash = std::array::from_fn(|i| random[32 + i] ^ random[64 + i]);
        Draw {
            session,
            key,
            id,
            id_nonce: std::array::from_fn(|i| random[64 + i]),
            call_hash,
            nonce: (at(80) >> 1).to_string(),
            token: std::array::from_fn(|i| random[80 + i]),
            agent,
        }
    }

    pub fn intent(&self, draw: &Draw) -> Intent {
        let authorization = Authorization {
            payer: PAYER.to_owned(),
            nonce: draw.nonce.clone(),
            dead_after: 60_000_000,
            at: 59_999_000,
        };
        Intent {
            quote: self.quote(draw),
            payment_id: PaymentId::from_bytes(draw.id),
            id_nonce: draw.id_nonce,
            authorization,
            lease_ms: 120_000,
            sign_within_ms: 10_000,
            account_ceiling: None,
        }
    }

    fn quote(&self, draw: &Draw) -> Quote {
        let call = Call {
            agent: parsed(&draw.agent),
            session: Some(draw.session.clone()),
            bounds: Default::default(),
            reference: self.listing.reference.clone(),
            network: parsed(NETWORK),
            scheme: "exact".to_owned(),
            asset: parsed(ASSET),
            max_amount: Amount::from_u64(AMOUNT),
            expected_version: None,
            arguments: raw("{}"),
            idempotency_key: Some(parsed(&draw.key)),
            input_responses: None,
            request_state: None,
        };
        let live = Live { endpoint: &self.endpoint, challenge: &self.challenge, listed_schema: None };
        guard::admit(&self.listing, live, &call, draw.call_hash, &self.rules, &Policy::default())
            .expect("an admitted call")
    }

    /// A row for each agent and the default of all, as a controller writes them; wide enough for any run.
    pub fn limits(&self) -> Vec<Limit> {
        let unit = Unit { network: parsed(NETWORK), asset: parsed(ASSET) };
        let wide = Amount::from_u64(u64::MAX);
        let limit = |subject: Subject| Limit {
            subject,
            unit: unit.clone(),
            per_call: Some(wide),
            per_session: Some(wide),
            per_day: Some(wide),
            unlimited: false,
            suspended: false,
            source: "file".to_owned(),
        };
        let agents = (0..self.agents).map(|n| Subject::Agent(parsed::<AgentId>(&format!("agent-{n:05}"))));
        agents.chain([Subject::EachAgent]).map(limit).collect()
    }
}
