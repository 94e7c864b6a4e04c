//! A gate around a program's own handlers, whatever MCP library it uses: requests and results are JSON values, and a
//! handler is an async function. A priced tool, resource or prompt is two lines, its price in the list and the call
//! around its handler; the rest is made once. `examples/` has whole servers on bare axum and on rmcp.
//!
//! ```no_run
//! use std::collections::{BTreeMap, BTreeSet};
//! use std::{path::Path, sync::Arc};
//! use serde_json::{Value, json};
//! use tollway::chain::stellar::{Settings as ChainSettings, Stellar};
//! use tollway::facilitator::Facilitator;
//! use tollway::gate::claims::{Claims, Terms};
//! use tollway::gate::desk::{Gate, Parts};
//! use tollway::gate::library::{Caller, PriceList};
//! use tollway::gate::prices::Unlisted;
//! use tollway::gate::sell::Settings;
//! use tollway::mcp::RpcError;
//! # use tollway::{http, ports::machine, seal::KeyRing};
//!
//! # async fn shop() -> Result<(), Box<dyn std::error::Error>> {
//! let prices = PriceList::new("stellar:testnet", "USDC", "GAOH2NR3A3R2VS6TUE6L75A3OMJ4UKJWEHHNL5GIIEQTS5RVZEK5LAP4")?
//!     .at("https://shop.example/mcp")
//!     .tool("search", "0.01")?
//!     .resource("docs://{id}", "0.002")?
//!     .build(Unlisted::Free)?;
//! let (world, _tasks) = machine::world();
//! let ring = KeyRing::parse(&std::env::var("TOLLWAY_KEY_RING")?)?;
//! # let limits = http::Limits { timeout: std::time::Duration::from_secs(30), max_response_bytes: 1 << 20 };
//! # let client = http::Client::new(world.clone(), http::Tls::Plain, http::Destination::Operator, limits);
//! // Asked what became of a settlement whose answer was lost.
//! let (network, rpc) = ("stellar:testnet".parse()?, "https://soroban-testnet.stellar.org".parse()?);
//! let chain = ChainSettings::known(&network, vec![rpc]).ok_or("an unknown network")?;
//! let chain = Stellar::new(chain, client.clone(), world.clone());
//! let facilitator = Facilitator::new(client, &"https://facilitator.example".parse()?);
//! let gate = Gate::new(Parts {
//!     claims: Claims::open_sqlite(Path::new("claims.sqlite"), world.clone(), ring, Terms::default()).await?,
//!     facilitators: BTreeMap::from([(network.clone(), facilitator)]),
//!     chains: BTreeMap::from([(network, Arc::new(chain))]),
//!     resolved_by_operator: BTreeSet::new(),
//!     settings: Settings::default(),
//!     prices,
//!     world,
//! })?;
//!
//! // One request of any MCP library, as JSON: `params` of a `tools/call`.
//! let params = json!({"name": "search", "arguments": {"q": "tolls"}});
//! async fn search(query: Value) -> Result<Value, RpcError> {
//!     Ok(json!({"content": [{"type": "text", "text": format!("about {query}")}]}))
//! }
//! let answer = gate.call("tools/call", &params, Caller::new("10.0.0.7"), search(params["arguments"].clone())).await;
//! # let _ = answer; Ok(()) }
//! ```

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;
use serde_json::value::RawValue;

use super::challenge::{self, Binding, Reason};
use super::desk::{Answer, Described, Gate, Request};
use super::prices::{About, Item, PriceError, Prices, Terms, Unlisted};
use super::sell::Ran;
use super::{Kind, extensions};
use crate::json;
use crate::mcp::{Revision, RpcError};
use crate::money::{Amount, Asset, Network};
use crate::x402::{Flow, assets};

/// Who asks, as the program's own server knows it.
#[derive(Debug, Clone, Copy)]
pub struct Caller<'a> {
    /// A network address or a name: whom junk is counted against.
    pub source: &'a str,
    /// The MCP session, which nobody else can name.
    pub session: Option<&'a str>,
    pub revision: Revision,
    /// What a request of 2026-07-28 declares.
    pub client_capabilities: Option<&'a Value>,
    /// The tool's entry in the program's `tools/list`: arguments that do not fit its `inputSchema` are refused before
    /// anybody is asked to pay, and catalogs learn of it.
    pub tool: Option<&'a Value>,
}

impl<'a> Caller<'a> {
    pub fn new(source: &'a str) -> Caller<'a> {
        Caller { source, session: None, revision: Revision::V2025_11_25, client_capabilities: None, tool: None }
    }
}

impl Gate {
    /// One request with its `params`. `handler` runs where the item is free, or is paid for; of a method that is neither
    /// `tools/call`, `resources/read` nor `prompts/get` it runs in any case. The result has a challenge, the output with
    /// its receipt, or the reason why there is none.
    pub async fn call<F>(&self, method: &str, params: &Value, caller: Caller<'_>, handler: F) -> Result<Value, RpcError>
    where
        F: Future<Output = Result<Value, RpcError>> + Send + 'static,
    {
        let Some(kind) = Kind::of_method(method) else { return handler.await };
        let (params, capabilities) = (json::raw(params), caller.client_capabilities.map(json::raw));
        let request = Request {
            kind,
            params: &params,
            revision: caller.revision,
            client_capabilities: capabilities.as_deref(),
            session: caller.session,
            source: caller.source,
            payment_header: false,
        };
        let described = async {
            let Some(entry) = caller.tool.map(json::raw) else { return Described::Fits { tool: None } };
            let none = json::raw(&serde_json::Map::new());
            Described::by(&entry, json::member(&params, "arguments").unwrap_or(&none), caller.revision)
        };
        // A free item's handler runs here, a paid one's in the sale.
        let slot = Arc::new(Mutex::new(Some(handler)));
        let taken = slot.clone();
        let sold = async move {
            match take(&taken) {
                Some(handler) => ran(handler.await),
                None => Ran::Error(RpcError::internal("The handler ran already")),
            }
        };
        match self.answer(request, described, sold).await {
            Answer::Free => match take(&slot) {
                Some(handler) => handler.await,
                None => Err(RpcError::internal("The handler ran already")),
            },
            Answer::Result(result) => read(&result),
            Answer::Error(error) => Err(error),
        }
    }

    /// The result of one of the four lists, with prices.
    pub fn list_value(&self, method: &str, result: Value) -> Value {
        let raw = json::raw(&result);
        self.list(method, &raw).and_then(|priced| read(&priced).ok()).unwrap_or(result)
    }
}

fn take<F>(slot: &Mutex<Option<F>>) -> Option<F> {
    slot.lock().unwrap_or_else(PoisonError::into_inner).take()
}

fn ran(said: Result<Value, RpcError>) -> Ran {
    match said {
        Err(error) => Ran::Error(error),
        Ok(result) => {
            let raw = json::raw(&result);
            if result.get("isError") == Some(&Value::Bool(true)) {
                Ran::Failed(raw)
            } else if result.get("resultType").and_then(Value::as_str) == Some("input_required") {
                Ran::Asks(raw)
            } else {
                Ran::Output(raw)
            }
        }
    }
}

fn read(raw: &RawValue) -> Result<Value, RpcError> {
    serde_json::from_str(raw.get()).map_err(|_| RpcError::internal("The result could not be read"))
}

/// The result that asks for a payment, for a program that decides by itself when to ask: `target` is the name or URI of
/// the request. A payment that answers it is sold by [`Gate::call`].
pub fn payment_required_result(item: &Item, target: &str) -> Value {
    let extensions = extensions::advertised(item, None);
    let required = challenge::required(item, target, &Reason::PaymentRequired(None), &extensions);
    let result = challenge::result(Binding::Envelope(item.kind), &required, None);
    serde_json::from_str(result.get()).unwrap_or_default()
}

/// Prices in one token, written as a person writes them.
#[derive(Debug, Clone)]
pub struct PriceList {
    terms: Terms,
    decimals: u8,
    url: Option<String>,
    items: Vec<Item>,
    free: BTreeSet<(Kind, String)>,
}

impl PriceList {
    /// `network`: CAIP-2, such as `stellar:testnet`. `token`: the symbol or contract of a known asset.
    pub fn new(network: &str, token: &str, pay_to: &str) -> Result<PriceList, PriceError> {
        let refuse = |member, problem: &str| PriceError { member, problem: problem.to_owned() };
        let network: Network = network.parse().map_err(|_| refuse("network", "is no CAIP-2 name"))?;
        let contract: Option<Asset> = token.parse().ok();
        let known = assets::by_symbol(&network, token)
            .or_else(|| assets::known(&crate::money::Unit { network: network.clone(), asset: contract? }));
        let known = known.ok_or_else(|| refuse("asset", "is no token of this network whose decimals are known"))?;
        let asset = known.asset.parse().map_err(|_| refuse("asset", "cannot be read"))?;
        let terms = Terms {
            scheme: "exact".into(),
            network,
            asset,
            amount: Amount::from_u64(0),
            shown_amount: String::new(),
            shown_asset: known.symbol.to_owned(),
            pay_to: pay_to.to_owned(),
            max_timeout_seconds: 60,
            flow: Flow::Authorization,
            extra: serde_json::Map::new(),
        };
        Ok(PriceList { terms, decimals: known.decimals, url: None, items: Vec::new(), free: BTreeSet::new() })
    }

    /// A member of `extra` of every offer that follows; EVM tokens need `name` and `version`.
    pub fn extra(mut self, name: &str, value: Value) -> PriceList {
        self.terms.extra.insert(name.to_owned(), value);
        self
    }

    /// Where buyers reach this server: what a challenge of every item that follows names, and what a catalog can dial.
    /// Without it that is `mcp://tool/{name}` and its likes.
    pub fn at(mut self, url: &str) -> PriceList {
        self.url = Some(url.to_owned());
        self
    }

    pub fn tool(self, name: &str, price: &str) -> Result<PriceList, PriceError> {
        self.item(Kind::Tool, name, price, Flow::Authorization, About::default())
    }

    /// A URI, or a URI template.
    pub fn resource(self, uri: &str, price: &str) -> Result<PriceList, PriceError> {
        self.item(Kind::Resource, uri, price, Flow::Authorization, About::default())
    }

    pub fn prompt(self, name: &str, price: &str) -> Result<PriceList, PriceError> {
        self.item(Kind::Prompt, name, price, Flow::Authorization, About::default())
    }

    /// Any item, with its flow and what a challenge says of it.
    pub fn item(
        mut self,
        kind: Kind,
        key: &str,
        price: &str,
        flow: Flow,
        about: About,
    ) -> Result<PriceList, PriceError> {
        let amount = Amount::from_decimal(price, self.decimals);
        let amount = amount.map_err(|e| PriceError { member: "price", problem: e.to_string() })?;
        let terms = Terms { amount, shown_amount: price.to_owned(), flow, ..self.terms.clone() };
        let about = About { url: about.url.or_else(|| self.url.clone()), ..about };
        self.items.push(Item::new(kind, key, vec![terms], about, false)?);
        Ok(self)
    }

    /// Free, whatever becomes of what is listed nowhere.
    pub fn free(mut self, kind: Kind, key: &str) -> PriceList {
        self.free.insert((kind, key.to_owned()));
        self
    }

    pub fn build(self, unlisted: Unlisted) -> Result<Prices, PriceError> {
        Prices::new(self.items, self.free, unlisted, BTreeSet::new())
    }
}

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::super::claims::tests::world;
    use super::super::claims::{Claims, Terms as ClaimTerms};
    use super::super::desk::{GateError, Parts};
    use super::super::prices::tests::{PAY_TO, USDC};
    use super::super::sell::Settings;
    use super::*;
    use crate::chain::stellar::presented_tests::payment as transaction;
    use crate::facilitator::{Facilitator, Recording};
    use crate::seal::KeyRing;

    async fn shop() -> (Gate, Recording, Prices, tempfile::TempDir) {
        let prices = PriceList::new("stellar:testnet", "USDC", PAY_TO).unwrap();
        let prices = prices.tool("search", "0.001").unwrap().prompt("brief", "0.5").unwrap();
        let prices = prices.free(Kind::Tool, "ping").build(Unlisted::Deny).unwrap();
        let (facilitator, recording) = Facilitator::recording();
        let (dir, (world, _)) = (tempfile::tempdir().unwrap(), world());
        let ring = KeyRing::new(vec![vec![7; 32]]).unwrap();
        let claims = Claims::open_sqlite(&dir.path().join("c"), world.clone(), ring, ClaimTerms::default()).await;
        let gate = Gate::new(Parts {
            claims: claims.unwrap(),
            facilitators: BTreeMap::from([("stellar:testnet".parse().unwrap(), facilitator)]),
            chains: BTreeMap::new(),
            resolved_by_operator: BTreeSet::from(["stellar:testnet".parse().unwrap()]),
            settings: Settings::default(),
            prices: prices.clone(),
            world,
        });
        (gate.unwrap(), recording, prices, dir)
    }

    async fn search() -> Result<Value, RpcError> {
        Ok(json!({"content": [], "found": 1}))
    }

    /// What a buyer makes of a challenge.
    fn paid(challenge: &Value) -> Value {
        let offer = &challenge["structuredContent"]["accepts"][0];
        let transaction = transaction(1, PAY_TO, USDC, 10_000, 5, 110, |_| {});
        let extensions = json!({"payment-identifier": {"info": {"required": false, "id": "pay_0123456789abcdef"}}});
        let payment = json!({"x402Version": 2, "accepted": offer, "payload": {"transaction": transaction}, "extensions": extensions});
        json!({"name": "search", "arguments": {}, "_meta": {"x402/payment": payment}})
    }

    #[tokio::test]
    async fn a_handler_is_sold_in_two_lines() {
        let (gate, recording, prices, _dir) = shop().await;
        let call = async |params: &Value| gate.call("tools/call", params, Caller::new("me"), search()).await;
        let unpaid = call(&json!({"name": "search", "arguments": {}})).await.unwrap();
        let item = prices.items().find(|item| item.key == "search").unwrap();
        assert_eq!(unpaid, payment_required_result(item, "search"));
        recording.assert_verified(0);
        let params = paid(&unpaid);
        let sold = call(&params).await.unwrap();
        assert_eq!((&sold["found"], &sold["_meta"]["x402/payment-response"]["success"]), (&json!(1), &json!(true)));
        assert_eq!(call(&params).await.unwrap(), sold);
        recording.assert_verified(1);
        recording.assert_settled(1);
        assert_eq!(call(&json!({"name": "ping"})).await.unwrap(), search().await.unwrap());
        assert_eq!(call(&json!({"name": "other"})).await.unwrap_err().code, -32602);
        let other = gate.call("tools/list", &json!({}), Caller::new("me"), async { Ok(json!({"tools": []})) }).await;
        assert_eq!(gate.list_value("tools/list", other.unwrap()), json!({"tools": []}));
        let listed = gate.list_value("prompts/list", json!({"prompts": [{"name": "brief"}]}));
        assert_eq!(listed["prompts"][0]["_meta"]["x402/price"]["amount"], "0.5");
    }

    #[tokio::test]
    async fn what_fails_is_not_settled_and_a_refusal_is_recorded() {
        let (gate, recording, _, _dir) = shop().await;
        let unpaid = gate.call("tools/call", &json!({"name": "search"}), Caller::new("me"), search()).await.unwrap();
        let params = paid(&unpaid);
        let fails = async { Ok(json!({"isError": true, "content": []})) };
        let failed = gate.call("tools/call", &params, Caller::new("me"), fails).await.unwrap();
        assert_eq!(failed, json!({"isError": true, "content": []}));
        recording.assert_verified(1);
        recording.assert_settled(0);
        recording.refuse(Some("insufficient_funds"));
        let refused = gate.call("tools/call", &params, Caller::new("me"), search()).await.unwrap();
        assert!(refused["structuredContent"]["error"].as_str().unwrap().contains("insufficient_funds"));
        recording.assert_settled(0);
    }

    #[tokio::test]
    async fn nobody_is_asked_to_pay_for_arguments_that_do_not_fit() {
        let (gate, recording, _, _dir) = shop().await;
        let tool = json!({"name": "search", "inputSchema": {"type": "object", "required": ["q"]}});
        let call = async |revision: Revision, arguments: Value| {
            let caller = Caller { tool: Some(&tool), revision, ..Caller::new("me") };
            gate.call("tools/call", &json!({"name": "search", "arguments": arguments}), caller, search()).await
        };
        let unfit = call(Revision::V2025_11_25, json!({})).await.unwrap();
        assert!(unfit["isError"] == true && unfit["structuredContent"].is_null(), "{unfit}");
        assert_eq!(call(Revision::V2025_03_26, json!({})).await.unwrap_err().code, -32602);
        let asked = call(Revision::V2025_11_25, json!({"q": "tolls"})).await.unwrap();
        assert!(asked["structuredContent"]["accepts"].is_array(), "{asked}");
        assert_eq!(asked["structuredContent"]["extensions"]["bazaar"]["info"]["input"]["toolName"], "search");
        recording.assert_verified(0);
    }

    #[tokio::test]
    async fn a_network_on_which_nobody_can_settle_or_resolve_is_refused() {
        let (gate, _, prices, dir) = shop().await;
        let network: Network = "stellar:testnet".parse().unwrap();
        let made = async |settles: bool, resolves: bool| {
            let (world, _) = world();
            let ring = KeyRing::new(vec![vec![7; 32]]).unwrap();
            let facilitator = settles.then(|| (network.clone(), Facilitator::recording().0));
            Gate::new(Parts {
                claims: Claims::open_sqlite(&dir.path().join("c"), world.clone(), ring, ClaimTerms::default())
                    .await
                    .unwrap(),
                facilitators: facilitator.into_iter().collect(),
                chains: BTreeMap::new(),
                resolved_by_operator: resolves.then(|| network.clone()).into_iter().collect(),
                settings: Settings::default(),
                prices: prices.clone(),
                world,
            })
        };
        assert!(matches!(made(false, true).await, Err(GateError::NoFacilitator(_))));
        assert!(matches!(made(true, false).await, Err(GateError::NoChain(_))));
        assert!(made(true, true).await.is_ok());
        let elsewhere = PriceList::new("stellar:pubnet", "USDC", PAY_TO).unwrap().tool("search", "1").unwrap();
        let elsewhere = gate.reprice(elsewhere.build(Unlisted::Deny).unwrap());
        assert!(matches!(elsewhere, Err(GateError::NoFacilitator(_))), "a running gate knows no more networks");
    }

    #[test]
    fn a_price_that_cannot_be_paid_is_refused() {
        for price in ["0.00000001", "1e-3", "0,01", "0", "-1", ""] {
            let list = PriceList::new("stellar:testnet", "USDC", PAY_TO).unwrap();
            assert_eq!(list.tool("search", price).unwrap_err().member, "price", "{price}");
        }
        let nowhere = PriceList::new("stellar:testnet", "USDC", PAY_TO).unwrap().at("shop.example/mcp");
        assert_eq!(nowhere.tool("search", "0.01").unwrap_err().member, "url");
        let at = PriceList::new("stellar:testnet", "USDC", PAY_TO).unwrap().at("https://shop.example/mcp");
        let at = at.tool("search", "0.01").unwrap().build(Unlisted::Free).unwrap();
        let required = payment_required_result(at.items().next().unwrap(), "search");
        assert_eq!(required["structuredContent"]["resource"]["url"], "https://shop.example/mcp");
        assert_eq!(PriceList::new("stellar:testnet", "NOPE", PAY_TO).unwrap_err().member, "asset");
        assert_eq!(PriceList::new("stellar", "USDC", PAY_TO).unwrap_err().member, "network");
        let list = PriceList::new("stellar:testnet", "USDC", "me").unwrap();
        assert_eq!(list.tool("search", "1").unwrap_err().member, "pay_to");
    }
}
