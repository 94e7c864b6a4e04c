//! A chain RPC of the world: the methods that the business code asks, and what a lying node makes of them.

use std::sync::Arc;

use serde_json::{Value, json};
use stellar_xdr::{
    ConfigSettingEntry, ConfigSettingId, Int128Parts, LedgerEntryData, LedgerFootprint, LedgerKey,
    LedgerKeyConfigSetting, Limits, ReadXdr, ScVal, SorobanResources, SorobanTransactionData,
    SorobanTransactionDataExt, StateArchivalSettings,
};

use tollway::chain::stellar::{Credentials, Settings, Stellar};
use tollway::http::Client;
use tollway::money::Network;

use super::chain::{self, Chain, NETWORK, PASSPHRASE, to_base64};
use super::http::{self, Reply, Request};
use super::world::{Ctx, World};

const LIMITS: Limits = Limits { depth: 200, len: 1 << 20 };
/// Ledgers that a node which runs ahead claims to be ahead.
const AHEAD: u32 = 100_000;

/// The RPCs of one chain, of which one lies at times.
pub fn start(world: &Arc<World>, chain: &Arc<Chain>, nodes: usize) {
    let liar = world.range(0, nodes as u64) as usize;
    for n in 0..nodes {
        let (lag, alone) = (world.range(0, 3) as u32, nodes == 1);
        let node = Node { chain: chain.clone(), lag, liar: n == liar, alone };
        world.start(&format!("node{n}"), true, move |ctx| {
            let (node, this) = (node.clone(), ctx.clone());
            http::serve(ctx, move |request| {
                let (node, ctx) = (node.clone(), this.clone());
                async move { node.answer(&ctx, &request) }
            })
        });
    }
}

/// The chain as the business code asks them for it.
pub fn stellar(nodes: usize, client: Client, ports: tollway::ports::World) -> (Network, Stellar) {
    let network: Network = NETWORK.parse().expect("a network");
    let settings = Settings {
        network: network.clone(),
        passphrase: PASSPHRASE.into(),
        rpc_urls: (0..nodes).map(|n| format!("https://node{n}.test/").parse().expect("a URL")).collect(),
        credentials: Credentials::Address,
        max_authorization_seconds: 300,
        min_ledger_ms: 4_000,
    };
    (network, Stellar::new(settings, client, ports))
}

#[derive(Clone)]
struct Node {
    chain: Arc<Chain>,
    /// Ledgers behind the newest.
    lag: u32,
    /// Only such a node lies.
    liar: bool,
    /// No other node could contradict it, so it does not lie about what only another one could show.
    alone: bool,
}

impl Node {
    fn lies(&self, ctx: &Ctx, chance: impl Fn(&super::rng::Faults) -> u64) -> bool {
        self.liar && ctx.world.chance(chance)
    }

    fn contradicts(&self, ctx: &Ctx, chance: impl Fn(&super::rng::Faults) -> u64) -> bool {
        !self.alone && self.lies(ctx, chance)
    }

    fn answer(&self, ctx: &Ctx, request: &Request) -> Reply {
        let Ok(body) = serde_json::from_slice::<Value>(&request.body) else { return Reply::Status(400, String::new()) };
        let answer = match self.result(ctx, body["method"].as_str().unwrap_or_default(), &body["params"]) {
            Ok(result) => json!({"jsonrpc": "2.0", "id": body["id"], "result": result}),
            Err(why) => json!({"jsonrpc": "2.0", "id": body["id"], "error": {"code": -32602, "message": why}}),
        };
        Reply::Json(answer.to_string())
    }

    fn result(&self, ctx: &Ctx, method: &str, params: &Value) -> Result<Value, String> {
        let world = &ctx.world;
        let view = self.chain.newest(world).saturating_sub(self.lag);
        let closed = |ledger: u32| {
            let since = u64::from(ledger.saturating_sub(chain::FIRST)) * chain::CLOSE_MS;
            ((world.unix_ms() - world.now_ms() + since) / 1000).to_string()
        };
        match method {
            "getNetwork" => Ok(json!({"passphrase": chain::PASSPHRASE, "protocolVersion": 25})),
            "getHealth" => Ok(json!({"status": "healthy", "latestLedger": view, "oldestLedger": 1})),
            "getLatestLedger" => {
                let ahead = if self.contradicts(ctx, |f| f.node_ahead) { AHEAD } else { 0 };
                world.count(|s| s.node_ahead += u64::from(ahead > 0));
                Ok(json!({"id": "x", "sequence": view + ahead, "protocolVersion": 25, "closeTime": closed(view)}))
            }
            "getLedgerEntries" => self.entries(ctx, params, view),
            "getTransaction" => {
                let hash = params["hash"].as_str().unwrap_or_default();
                let mut answer = json!({"status": "NOT_FOUND", "latestLedger": view, "oldestLedger": 1,
                    "latestLedgerCloseTime": closed(view)});
                if let Some(transfer) = self.chain.find(hash, view) {
                    answer["status"] = json!("SUCCESS");
                    answer["ledger"] = json!(transfer.ledger);
                    answer["envelopeXdr"] = json!(transfer.envelope);
                }
                Ok(answer)
            }
            "getEvents" => {
                world.count(|s| s.histories_read += 1);
                let range = params["startLedger"].as_u64().unwrap_or(0)..params["endLedger"].as_u64().unwrap_or(0);
                let events: Vec<_> = self
                    .chain
                    .transfers()
                    .iter()
                    .filter(|t| t.ledger <= view && range.contains(&u64::from(t.ledger)))
                    .map(|t| json!({"txHash": t.hash, "ledger": t.ledger, "type": "contract"}))
                    .collect();
                Ok(json!({"events": events, "cursor": "0", "latestLedger": view, "oldestLedger": 1}))
            }
            "simulateTransaction" => self.simulate(ctx, params, view),
            _ => Err("no such method".into()),
        }
    }

    fn entries(&self, ctx: &Ctx, params: &Value, view: u32) -> Result<Value, String> {
        let mut entries = Vec::new();
        let (hides, ahead) = (self.contradicts(ctx, |f| f.node_hides), self.contradicts(ctx, |f| f.node_ahead));
        for text in params["keys"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            match LedgerKey::from_xdr_base64(text, LIMITS).map_err(|_| "key")? {
                LedgerKey::ConfigSetting(LedgerKeyConfigSetting {
                    config_setting_id: ConfigSettingId::StateArchival,
                }) => {
                    let settings =
                        StateArchivalSettings { min_temporary_ttl: self.chain.min_ttl, ..Default::default() };
                    let data = LedgerEntryData::ConfigSetting(ConfigSettingEntry::StateArchival(settings));
                    entries.push(json!({"key": text, "xdr": to_base64(&data), "lastModifiedLedgerSeq": 1}));
                }
                LedgerKey::ContractData(data) if data.key == ScVal::LedgerKeyContractInstance => {
                    let entry = to_base64(&chain::asset_instance(data));
                    entries.push(json!({"key": text, "xdr": entry, "lastModifiedLedgerSeq": 1}));
                }
                LedgerKey::ContractData(data) => {
                    let ScVal::LedgerKeyNonce(nonce) = data.key else { continue };
                    let Some(ledger) = self.chain.used(nonce.nonce, view) else { continue };
                    if hides {
                        ctx.world.count(|s| s.node_hid += 1);
                        ctx.trace(&format!("hides {}", nonce.nonce));
                        continue;
                    }
                    let data = to_base64(&chain::nonce_data(nonce.nonce));
                    entries.push(json!({"key": text, "xdr": data, "lastModifiedLedgerSeq": ledger}));
                }
                _ => {}
            }
        }
        let latest = view + if ahead { AHEAD } else { 0 };
        Ok(json!({"entries": entries, "latestLedger": latest}))
    }

    fn simulate(&self, ctx: &Ctx, params: &Value, view: u32) -> Result<Value, String> {
        let transaction = params["transaction"].as_str().unwrap_or_default();
        let signed = match chain::read(transaction) {
            Ok(signed) => signed,
            // No authorization: `balance`.
            Err("not one authorization") => {
                let balance = self.chain.balance();
                let value = ScVal::I128(Int128Parts { hi: (balance >> 64) as i64, lo: balance as u64 });
                let results = json!([{"xdr": to_base64(&value), "auth": []}]);
                return Ok(json!({"latestLedger": view, "results": results, "minResourceFee": "1"}));
            }
            Err(why) => return Ok(json!({"latestLedger": view, "error": why, "events": [], "results": []})),
        };
        let nonce = signed.credentials.nonce;
        self.chain.show(&ctx.world, nonce);
        if ctx.world.chance(|f| f.node_submits) {
            // Whoever sees a signed entry can use it.
            ctx.world.count(|s| s.node_submitted += 1);
            let _ = self.chain.submit(&ctx.world, transaction);
        }
        let altered = self.lies(ctx, |f| f.node_alters);
        let mut entry = signed.entry.clone();
        let mut keys = vec![chain::nonce_key(&signed.credentials.address, nonce)];
        if altered {
            ctx.world.count(|s| s.node_altered += 1);
            ctx.trace("alters a simulation");
            if ctx.world.permille(500) {
                if let stellar_xdr::SorobanCredentials::Address(c) = &mut entry.credentials {
                    c.signature_expiration_ledger += 1_000;
                }
            } else {
                keys = vec![chain::nonce_key(&signed.credentials.address, nonce ^ 1)];
            }
        }
        let data = SorobanTransactionData {
            ext: SorobanTransactionDataExt::V0,
            resources: SorobanResources {
                footprint: LedgerFootprint {
                    read_only: Default::default(),
                    read_write: keys.try_into().map_err(|_| "keys")?,
                },
                instructions: 1,
                disk_read_bytes: 1,
                write_bytes: 1,
            },
            resource_fee: 100,
        };
        let results = json!([{"xdr": to_base64(&ScVal::Void), "auth": [to_base64(&entry)]}]);
        Ok(json!({"latestLedger": view, "transactionData": to_base64(&data), "minResourceFee": "100",
            "results": results, "events": []}))
    }
}
