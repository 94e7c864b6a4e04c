//! The agent's tools over the MCP front.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use futures_util::future::{BoxFuture, join_all};
use serde_json::value::RawValue;

use super::args::Args;
use super::errors::{self, Problem, amount_json, offer_json};
use super::next::next;
use super::time::rfc3339;
use super::{result, schemas};
use crate::catalog::{Catalog, Kind, Listing, ResourceRef, SearchQuery, Skip, Status, warnings};
use crate::guard::{self, Call};
use crate::json;
use crate::ledger::{BudgetLine, LedgerError, Payment};
use crate::mcp::{Handler, RequestContext, Revision, RpcError};
use crate::money::{AgentId, Amount, Asset, Bounds, IdempotencyKey, Network, PaymentId, Unit};
use crate::pay::object::{Object, array};
use crate::pay::{CallOutcome, Funds, Payer, Phase, Which};
use crate::telemetry;
use crate::upstream::Upstream;

/// Keyless payments whose answer is on its way to the agent. Of more than so many some are not marked as answered: a
/// repeated call then gets the stored outcome, which costs nothing.
const MAX_UNDELIVERED: usize = 10_000;

/// A seller that takes longer to say that it is there is reported as unreachable.
const PROBE_TIME: std::time::Duration = std::time::Duration::from_secs(3);

/// The handler behind the agents' MCP front: discovery only, or paying.
pub struct AgentTools {
    catalog: Catalog,
    payer: Option<Payer>,
    /// Asks sellers whether they are there (`initialize` or `server/discover`, and `tools/list`), for warnings.
    upstream: Option<Upstream>,
    /// Whose budget is used where the transport authenticates nobody: stdio.
    local_agent: Option<AgentId>,
    undelivered: Mutex<BTreeSet<PaymentId>>,
}

/// How a tool ends other than by its output.
enum Failure {
    /// A tool result with `isError`; a fault of ours is a JSON-RPC error.
    Tool(Box<Problem>),
    /// A request that no tool answers.
    Rpc(RpcError),
}
impl From<Box<Problem>> for Failure {
    fn from(problem: Box<Problem>) -> Failure {
        Failure::Tool(problem)
    }
}
impl From<Problem> for Failure {
    fn from(problem: Problem) -> Failure {
        Box::new(problem).into()
    }
}

impl AgentTools {
    /// `payer: None` is discovery only: the paying tools do not exist.
    pub fn new(catalog: Catalog, payer: Option<Payer>, local_agent: Option<AgentId>) -> AgentTools {
        AgentTools { catalog, payer, upstream: None, local_agent, undelivered: Mutex::default() }
    }

    /// With it `x402_get_resource` tells whether the seller's endpoint answers and lists the tool.
    pub fn probing(self, upstream: Upstream) -> AgentTools {
        AgentTools { upstream: Some(upstream), ..self }
    }

    async fn tool(&self, context: &RequestContext, params: Option<&RawValue>) -> Result<Box<RawValue>, RpcError> {
        let name = params.and_then(|params| json::member(params, "name")).and_then(json::string);
        let Some(name) = name else { return Err(RpcError::invalid_params("tools/call needs the tool's name")) };
        let arguments = params.and_then(|params| json::member(params, "arguments"));
        let answer = match (name.as_ref(), &self.payer) {
            (schemas::SEARCH, _) => self.search(arguments).await.map(|out| result::plain(&out, false)),
            (schemas::GET, _) => self.get(arguments).await.map(|out| result::plain(&out, false)),
            (schemas::CALL, Some(payer)) => self.call(payer, context, arguments).await,
            (schemas::PAYMENT, Some(payer)) => {
                self.payment(payer, context, arguments).await.map(|out| result::plain(&out, false))
            }
            (schemas::BUDGET, Some(payer)) => {
                self.budget(payer, context, arguments).await.map(|out| result::plain(&out, false))
            }
            _ => {
                let shown: String = name.chars().take(64).collect();
                return Err(RpcError::invalid_params(format!("Unknown tool: {shown}")));
            }
        };
        match answer {
            Ok(result) => Ok(result),
            Err(Failure::Tool(problem)) if problem.code == errors::Code::Internal => Err(problem.rpc()),
            Err(Failure::Tool(problem)) => Ok(result::plain(&problem.json(), true)),
            Err(Failure::Rpc(error)) => Err(error),
        }
    }

    fn agent<'a>(&'a self, context: &'a RequestContext) -> Result<&'a AgentId, Failure> {
        context
            .agent
            .as_ref()
            .or(self.local_agent.as_ref())
            .ok_or_else(|| Failure::Rpc(RpcError::invalid_request("a paying tool needs an authenticated caller")))
    }

    async fn search(&self, arguments: Option<&RawValue>) -> Result<Box<RawValue>, Failure> {
        const KNOWN: [&str; 9] =
            ["query", "type", "network", "scheme", "payTo", "asset", "extensions", "limit", "cursor"];
        let args = Args::new(arguments, &KNOWN)?;
        let query = SearchQuery {
            query: args.text("query", 512)?,
            kind: args.parsed::<Kind>("type", 16)?,
            network: args.parsed::<Network>("network", 64)?,
            scheme: args.text("scheme", 64)?,
            pay_to: args.text("payTo", 128)?,
            asset: args.parsed::<Asset>("asset", 128)?,
            extensions: args.texts("extensions", 16, 64)?,
            limit: args.integer("limit", 1, 200)?,
            cursor: args.text("cursor", 8192)?,
        };
        let page = self.catalog.search(&query).await.map_err(|e| errors::catalog_problem(&e))?;
        let pagination = Object::new().with("limit", &page.limit).with("cursor", &page.cursor).build();
        let skipped = skipped(&page.skipped);
        if page.items.is_empty() {
            let message = "The catalog has no matching resource on this page.";
            let problem = Problem::no_results("empty", message, "Widen the search, or go on with the cursor.")
                .more("pagination", pagination);
            return Err(match skipped {
                Some(skipped) => problem.more("skipped", skipped).into(),
                None => problem.into(),
            });
        }
        let resources: Vec<_> = page.items.iter().map(wrap).collect();
        Ok(Object::new()
            .with("x402Version", &2)
            .raw("resources", &array(resources.iter().map(|item| &**item)))
            .with("partialResults", &page.partial_results)
            .raw("pagination", &pagination)
            .maybe_raw("skipped", skipped.as_deref())
            .build())
    }

    async fn get(&self, arguments: Option<&RawValue>) -> Result<Box<RawValue>, Failure> {
        let args = Args::new(arguments, &["ref", "expectedVersionHash"])?;
        let reference = args.required("ref", args.parsed::<ResourceRef>("ref", 8192)?)?;
        let expected = args.hash("expectedVersionHash")?;
        let mut listing = self.catalog.resolve(&reference).await.map_err(|e| errors::catalog_problem(&e))?;
        if expected.is_some_and(|expected| expected != listing.version_hash) {
            listing.status = Status::Stale;
            listing.warn(warnings::VERSION_CHANGED);
        }
        self.probe(&mut listing).await;
        Ok(wrap(&listing))
    }

    /// The endpoint is the catalog's, never one that the agent supplied; no tool is called.
    async fn probe(&self, listing: &mut Listing) {
        let (Some(upstream), Some(tool)) = (&self.upstream, listing.reference.tool_name.clone()) else { return };
        let Ok(endpoint) = upstream.endpoint(&listing.reference.url, listing.transport) else { return };
        let doubt = match tokio::time::timeout(PROBE_TIME, upstream.liveness(&endpoint)).await {
            Ok(Ok(alive)) if alive.tools.contains(&tool) => return,
            Ok(Ok(_)) => warnings::TOOL_NOT_OFFERED,
            Ok(Err(_)) | Err(_) => warnings::ENDPOINT_UNREACHABLE,
        };
        listing.warn(doubt);
        if listing.status == Status::Active {
            listing.status = Status::Unknown;
        }
    }

    async fn call(
        &self,
        payer: &Payer,
        context: &RequestContext,
        arguments: Option<&RawValue>,
    ) -> Result<Box<RawValue>, Failure> {
        let ended = self.paid_call(payer, context, arguments).await;
        match &ended {
            Ok(outcome) => telemetry::OUTCOMES.one(["OK", outcome.ending.as_str()]),
            Err(Failure::Tool(problem)) => telemetry::OUTCOMES.one([problem.code.as_str(), problem.word()]),
            Err(Failure::Rpc(_)) => {}
        }
        Ok(result::paid(&ended?.output))
    }

    async fn paid_call(
        &self,
        payer: &Payer,
        context: &RequestContext,
        arguments: Option<&RawValue>,
    ) -> Result<CallOutcome, Failure> {
        let args = Args::new(arguments, &schemas::CALL_ARGUMENTS)?;
        let request_state = args.raw("requestState");
        if request_state.is_some_and(|state| json::string(state).is_none()) {
            return Err(Problem::argument("requestState", "must be a string").into());
        }
        let call = Call {
            agent: self.agent(context)?.clone(),
            session: session(context).map(str::to_owned),
            bounds: context.claims.bounds.clone(),
            reference: args.required("ref", args.parsed::<ResourceRef>("ref", 8192)?)?,
            network: args.required("network", args.parsed::<Network>("network", 64)?)?,
            scheme: args.required("scheme", args.text("scheme", 64)?)?,
            asset: args.required("asset", args.parsed::<Asset>("asset", 128)?)?,
            max_amount: args.required("maxAtomicAmount", args.parsed::<Amount>("maxAtomicAmount", 78)?)?,
            expected_version: args.hash("expectedVersionHash")?,
            arguments: args.object("arguments")?.map_or_else(|| Object::new().build(), ToOwned::to_owned),
            idempotency_key: args.parsed::<IdempotencyKey>("idempotencyKey", 128)?,
            input_responses: args.object("inputResponses")?.map(ToOwned::to_owned),
            request_state: request_state.map(ToOwned::to_owned),
        };
        let outcome = payer
            .call(call, context.cancelled.clone(), context.progress.clone())
            .await
            .map_err(|error| errors::problem(&error))?;
        if let Some(id) = outcome.answers() {
            note_undelivered(&mut self.undelivered.lock().unwrap_or_else(PoisonError::into_inner), id);
        }
        Ok(outcome)
    }

    async fn payment(
        &self,
        payer: &Payer,
        context: &RequestContext,
        arguments: Option<&RawValue>,
    ) -> Result<Box<RawValue>, Failure> {
        let args = Args::new(arguments, &["paymentIdentifier", "idempotencyKey"])?;
        let id = args.parsed::<PaymentId>("paymentIdentifier", 64)?;
        let key = args.parsed::<IdempotencyKey>("idempotencyKey", 128)?;
        let which = match (id, &key) {
            (Some(id), None) => Which::Id(id),
            (None, Some(key)) => Which::Key(key),
            (None, None) => return Err(Problem::argument("paymentIdentifier", "or idempotencyKey is missing").into()),
            (Some(_), Some(_)) => {
                return Err(Problem::argument("idempotencyKey", "must be absent beside a paymentIdentifier").into());
            }
        };
        let found = payer.payment(self.agent(context)?, which).await.map_err(|e| ledger(&e))?;
        let Some((row, receipt)) = found else {
            let message = "No payment of yours has this identifier or key.";
            return Err(Problem::no_results("payment_not_found", message, "Check the identifier or key.").into());
        };
        Ok(payment_json(&row, receipt.as_deref()))
    }

    async fn budget(
        &self,
        payer: &Payer,
        context: &RequestContext,
        arguments: Option<&RawValue>,
    ) -> Result<Box<RawValue>, Failure> {
        Args::new(arguments, &[])?;
        let mut lines = payer.budget(self.agent(context)?, session(context)).await.map_err(|e| ledger(&e))?;
        lines.iter_mut().for_each(|line| lower(line, &context.claims.bounds));
        let funds = join_all(lines.iter().map(|line| payer.funds(&line.unit))).await;
        let lines: Vec<_> = lines.iter().zip(funds).map(|(line, funds)| budget_json(line, &funds)).collect();
        Ok(Object::new().raw("budgets", &array(lines.iter().map(|line| &**line))).build())
    }
}

/// As the reservation does it: what the credential bounds is lower than the limit, or does nothing.
fn lower(line: &mut BudgetLine, of_credential: &BTreeMap<Unit, Bounds>) {
    let limits = Bounds { per_call: line.per_call, per_session: line.per_session, per_day: line.per_day };
    let Bounds { per_call, per_session, per_day } = guard::bounds(of_credential, &line.unit).and(limits);
    (line.per_call, line.per_session, line.per_day) = (per_call, per_session, per_day);
}

/// Whose session budget is used.
fn session(context: &RequestContext) -> Option<&str> {
    context.claims.session.as_deref().or(context.session.as_deref())
}

/// Answers that never arrive stay in the set, so it must not be they that keep the new ones out.
fn note_undelivered(undelivered: &mut BTreeSet<PaymentId>, id: PaymentId) {
    if undelivered.len() >= MAX_UNDELIVERED {
        undelivered.pop_first();
    }
    undelivered.insert(id);
}

fn ledger(error: &LedgerError) -> Problem {
    errors::internal(Phase::Lookup, error)
}

/// `{resource, wrapper}`: the catalog's object unchanged, and what Tollway says about it.
fn wrap(listing: &Listing) -> Box<RawValue> {
    let offers: Vec<_> = listing.offers.iter().map(offer_json).collect();
    let wrapper = Object::new()
        .with("ref", &listing.reference.to_string())
        .with("versionHash", &listing.version_hash)
        .with("provenance", "seller_declared")
        .with("status", listing.status.as_str())
        .with("warnings", &listing.warnings)
        .raw("offers", &array(offers.iter().map(|offer| &**offer)))
        .build();
    Object::new().raw("resource", &listing.raw).raw("wrapper", &wrapper).build()
}

/// `[{reason, count}]`, or `None` where nothing was skipped.
fn skipped(skips: &[Skip]) -> Option<Box<RawValue>> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for skip in skips {
        *counts.entry(skip.0).or_default() += 1;
    }
    let counts: Vec<_> = counts
        .into_iter()
        .map(|(reason, count)| Object::new().with("reason", reason).with("count", &count).build())
        .collect();
    (!counts.is_empty()).then(|| array(counts.iter().map(|count| &**count)))
}

fn payment_json(row: &Payment, receipt: Option<&RawValue>) -> Box<RawValue> {
    let unit = Unit { network: row.network.clone(), asset: row.asset.clone() };
    let (action, text) = next(row);
    Object::new()
        .with("paymentIdentifier", &row.payment_id.to_hex())
        .with("idempotencyKey", &row.idempotency_key.as_ref().map(IdempotencyKey::as_str))
        .with("ref", &row.resource_ref)
        .with("versionHash", &row.version_hash)
        .with("network", unit.network.as_str())
        .with("scheme", &row.scheme)
        .with("asset", unit.asset.as_str())
        .with("payTo", &row.pay_to)
        .raw("amount", &amount_json(row.reserved, &unit))
        .with("state", row.state.as_str())
        .with("reason", &row.reason)
        .raw("receipt", receipt.unwrap_or(RawValue::NULL))
        .raw("next", &Object::new().with("action", action).with("text", text).build())
        .with("createdAt", &rfc3339(row.created_ms))
        .with("updatedAt", &rfc3339(row.updated_ms))
        .build()
}

fn budget_json(line: &BudgetLine, funds: &Funds) -> Box<RawValue> {
    let unit = &line.unit;
    let amount = |amount: Amount| amount_json(amount, unit);
    let maybe = |limit: Option<Amount>| limit.map(amount);
    let window = |limit: Option<Amount>, spent: Amount, held: Amount| {
        let used = spent.checked_add(held).unwrap_or(Amount::MAX);
        Object::new()
            .with("limit", &maybe(limit))
            .with("spent", &amount(spent))
            .with("held", &amount(held))
            .with("remaining", &maybe(limit.map(|limit| limit.remaining_after(used))))
            .build()
    };
    let total = line.total_per_day.map(|limit| {
        Object::new()
            .with("limit", &amount(limit))
            .with("used", &amount(line.total_used))
            .with("remaining", &amount(limit.remaining_after(line.total_used)))
            .build()
    });
    let earlier: Vec<_> = line
        .earlier_holds
        .iter()
        .map(|(id, day, held)| {
            Object::new()
                .with("paymentIdentifier", &id.to_hex())
                .with("day", day)
                .with("amount", &amount(*held))
                .build()
        })
        .collect();
    let payer = match funds {
        Funds::Of { payer, balance } => {
            Object::new().with("address", payer).with("balance", &amount(*balance)).with("trustline", &true).build()
        }
        Funds::NoTrustline { payer } => {
            Object::new().with("address", payer).with("balance", &None::<()>).with("trustline", &false).build()
        }
        Funds::Unknown => RawValue::NULL.to_owned(),
    };
    Object::new()
        .with("network", unit.network.as_str())
        .with("asset", unit.asset.as_str())
        .with("suspended", &line.suspended)
        .with("unlimited", &line.unlimited)
        .with("perCall", &maybe(line.per_call))
        .raw("day", &window(line.per_day, line.day_spent, line.day_held))
        .raw("session", &window(line.per_session, line.session_spent, line.session_held))
        .with("total", &total)
        .raw("earlierHolds", &array(earlier.iter().map(|hold| &**hold)))
        .with("resetsAt", &rfc3339(line.resets_at_ms))
        .raw("payer", &payer)
        .build()
}

impl Handler for AgentTools {
    fn server_info(&self) -> (&str, &str, Option<&str>) {
        let instructions = if self.payer.is_some() { schemas::INSTRUCTIONS } else { schemas::DISCOVERY_INSTRUCTIONS };
        ("tollway", env!("CARGO_PKG_VERSION"), Some(instructions))
    }

    fn capabilities(&self, _revision: Revision) -> Box<RawValue> {
        Object::new().raw("tools", &Object::new().build()).build()
    }

    fn call<'a>(
        &'a self,
        context: &'a RequestContext,
        method: &'a str,
        params: Option<&'a RawValue>,
    ) -> BoxFuture<'a, Result<Box<RawValue>, RpcError>> {
        Box::pin(async move {
            match method {
                "tools/list" => match params.and_then(|params| json::member(params, "cursor")) {
                    Some(_) => Err(RpcError::invalid_params("the tool list has one page: no cursor is valid")),
                    None => Ok(schemas::list(self.payer.is_some())),
                },
                "tools/call" => self.tool(context, params).await,
                other => Err(RpcError::method_not_found(other)),
            }
        })
    }

    /// The answer of a keyless payment has reached its caller: the next call of that kind is a new one.
    fn ends_sessions(&self) -> bool {
        self.payer.is_some()
    }

    fn end_session<'a>(&'a self, session: &'a str, expires_ms: u64) -> BoxFuture<'a, Result<(), RpcError>> {
        Box::pin(async move {
            let Some(payer) = &self.payer else { return Err(RpcError::internal("Sessions cannot be ended here")) };
            payer.end_session(session, expires_ms).await.map_err(|error| {
                tracing::error!(%error, "a session's end could not be written");
                RpcError::internal("The session's end could not be written: try again")
            })
        })
    }

    fn session_ended<'a>(&'a self, session: &'a str) -> BoxFuture<'a, bool> {
        Box::pin(async move {
            let Some(payer) = &self.payer else { return false };
            payer.session_ended(session).await.unwrap_or_else(|error| {
                tracing::warn!(%error, "the ledger could not be asked whether a session has ended");
                false
            })
        })
    }

    fn delivered<'a>(
        &'a self,
        _context: &'a RequestContext,
        method: &'a str,
        result: &'a RawValue,
    ) -> BoxFuture<'a, ()> {
        Box::pin(async move {
            let Some(payer) = self.payer.as_ref().filter(|_| method == "tools/call") else { return };
            let id = json::member(result, "structuredContent")
                .filter(|output| json::member(output, "content").is_some())
                .and_then(|output| json::member(output, "paymentIdentifier"))
                .and_then(json::string)
                .and_then(|id| id.parse::<PaymentId>().ok());
            let Some(id) = id else { return };
            let waited = self.undelivered.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
            if waited {
                payer.answered(id);
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_that_were_never_delivered_do_not_keep_new_ones_from_being_marked() {
        let id = |n: usize| {
            let mut bytes = [0; 32];
            bytes[..8].copy_from_slice(&n.to_be_bytes());
            PaymentId::from_bytes(bytes)
        };
        let mut undelivered = (0..MAX_UNDELIVERED).map(id).collect();
        note_undelivered(&mut undelivered, id(MAX_UNDELIVERED));
        assert!(undelivered.contains(&id(MAX_UNDELIVERED)));
        assert_eq!(undelivered.len(), MAX_UNDELIVERED);
    }
}
