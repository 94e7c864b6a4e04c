//! `getEvents`: contract events of the kept ledgers, with the real server's filters, paging and range checks.

use serde::Deserialize;
use serde_json::{Value, json};
use stellar_xdr::{ContractEvent, ContractEventBody, ReadXdr, ScVal};

use super::methods::time;
use super::{RpcError, Server, base64, base64_all, base64_only};
use crate::sandbox::chain::{Chain, Closed, Included, LIMITS, lock};

/// As the real server bounds them.
const MAX_FILTERS: usize = 5;
const MAX_IDS: usize = 5;
const MAX_TOPICS: usize = 5;
const MAX_SEGMENTS: usize = 4;
const MAX_LIMIT: usize = 10_000;
const DEFAULT_LIMIT: usize = 100;
/// How many ledgers one request looks at; the cursor goes on from there.
const SCAN: u32 = 10_000;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GetEvents {
    #[serde(default)]
    start_ledger: u32,
    /// Exclusive.
    #[serde(default)]
    end_ledger: u32,
    #[serde(default)]
    filters: Vec<Filter>,
    pagination: Option<Pagination>,
    xdr_format: Option<String>,
}

#[derive(Deserialize)]
struct Pagination {
    cursor: Option<String>,
    limit: Option<usize>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Filter {
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    contract_ids: Vec<String>,
    #[serde(default)]
    topics: Vec<Vec<String>>,
}

/// Where an event stands: ledger, transaction (from 1), operation, event. As text it is the event's id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    /// Ledger in the upper half, then 20 bits of transaction and 12 of operation (Horizon's TOID).
    toid: u64,
    event: u32,
}

impl Place {
    fn new(ledger: u32, transaction: usize, event: usize) -> Place {
        let transaction = u64::try_from(transaction).unwrap_or(u64::MAX) & 0xf_ffff;
        Place { toid: u64::from(ledger) << 32 | transaction << 12, event: u32::try_from(event).unwrap_or(u32::MAX) }
    }

    /// Behind everything in the ledger.
    fn end(ledger: u32) -> Place {
        Place { toid: u64::from(ledger) << 32 | 0xffff_ffff, event: u32::MAX }
    }

    fn ledger(self) -> u32 {
        u32::try_from(self.toid >> 32).unwrap_or(u32::MAX)
    }

    fn text(self) -> String {
        format!("{:019}-{:010}", self.toid, self.event)
    }

    fn parse(text: &str) -> Option<Place> {
        let (toid, event) = text.split_once('-')?;
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        if !digits(toid) || !digits(event) {
            return None;
        }
        Some(Place { toid: toid.parse().ok()?, event: event.parse().ok()? })
    }
}

impl Server {
    pub fn events(&self, asked: GetEvents) -> Result<Value, RpcError> {
        base64_only(asked.xdr_format.as_deref())?;
        let filters = filters(&asked.filters)?;
        let limit = asked.pagination.as_ref().and_then(|page| page.limit).unwrap_or(DEFAULT_LIMIT);
        if limit == 0 || limit > MAX_LIMIT {
            return Err(RpcError::InvalidParams(format!("limit must not exceed {MAX_LIMIT} and be positive")));
        }
        let chain = lock(&self.chain);
        let latest = self.node.latest(&chain);
        let oldest = chain.oldest(latest);
        let after = match asked.pagination.as_ref().and_then(|page| page.cursor.as_deref()) {
            Some(_) if asked.start_ledger != 0 || asked.end_ledger != 0 => {
                return Err(RpcError::InvalidParams("ledger ranges and cursor cannot both be set".into()));
            }
            Some(cursor) => Some(Place::parse(cursor).ok_or_else(|| RpcError::InvalidParams("invalid cursor".into()))?),
            None if asked.start_ledger == 0 => {
                return Err(RpcError::InvalidParams("startLedger must be positive".into()));
            }
            None => None,
        };
        let start = after.map_or(asked.start_ledger, Place::ledger);
        // A cursor that stands behind the newest ledger waits for the next one.
        let waits = after.is_some() && start == latest.saturating_add(1);
        if start < oldest || start > latest && !waits {
            return Err(RpcError::InvalidRequest(format!(
                "startLedger must be within the ledger range: {oldest} - {latest}"
            )));
        }
        if after.is_none() && asked.end_ledger != 0 && asked.end_ledger <= start {
            return Err(RpcError::InvalidParams("endLedger must be after startLedger".into()));
        }
        let mut end = start.saturating_add(SCAN).min(latest.saturating_add(1));
        if asked.end_ledger != 0 {
            end = end.min(asked.end_ledger);
        }
        let (events, last) = scan(&chain, start..end, after, &filters, limit)?;
        let cursor = match last {
            Some(last) if events.len() >= limit => last,
            _ => Place::end(end.saturating_sub(1)).max(after.unwrap_or(Place::end(0))),
        };
        Ok(json!({
            "events": events,
            "cursor": cursor.text(),
            "latestLedger": latest,
            "latestLedgerCloseTime": time(&chain, latest).to_string(),
            "oldestLedger": oldest,
            "oldestLedgerCloseTime": time(&chain, oldest).to_string(),
        }))
    }
}

/// The matching events of the range behind `after`, at most `limit`, and where the last of them stands.
fn scan(
    chain: &Chain,
    range: std::ops::Range<u32>,
    after: Option<Place>,
    filters: &[Matcher],
    limit: usize,
) -> Result<(Vec<Value>, Option<Place>), RpcError> {
    let (mut found, mut last) = (Vec::new(), None);
    for ledger in range.filter_map(|seq| chain.ledger(seq)) {
        for (order, transaction) in (1..).zip(&ledger.transactions) {
            for (at, event) in transaction.events.iter().enumerate() {
                let place = Place::new(ledger.seq, order, at);
                if Some(place) <= after || !(filters.is_empty() || filters.iter().any(|filter| filter.takes(event))) {
                    continue;
                }
                found.push(shown(ledger, order, transaction, place, event)?);
                last = Some(place);
                if found.len() >= limit {
                    return Ok((found, last));
                }
            }
        }
    }
    Ok((found, last))
}

fn shown(
    ledger: &Closed,
    order: usize,
    transaction: &Included,
    place: Place,
    event: &ContractEvent,
) -> Result<Value, RpcError> {
    let ContractEventBody::V0(body) = &event.body;
    Ok(json!({
        "type": "contract",
        "ledger": ledger.seq,
        "ledgerClosedAt": iso8601(ledger.time),
        "contractId": event.contract_id.as_ref().map(ToString::to_string).unwrap_or_default(),
        "id": place.text(),
        "operationIndex": 0,
        "transactionIndex": order,
        "inSuccessfulContractCall": true,
        "txHash": hex::encode(transaction.hash),
        "topic": base64_all(&body.topics)?,
        "value": base64(&body.data)?,
    }))
}

/// A filter whose texts were read: it takes an event of one of its contracts with one of its topic lists.
struct Matcher {
    contracts: Vec<String>,
    topics: Vec<Topics>,
}

struct Topics {
    segments: Vec<Segment>,
    /// `**` at the end: any number of further topics.
    open: bool,
}

enum Segment {
    Any,
    Exactly(Box<ScVal>),
}

impl Matcher {
    fn takes(&self, event: &ContractEvent) -> bool {
        let ContractEventBody::V0(body) = &event.body;
        let contract = event.contract_id.as_ref().map(ToString::to_string);
        (self.contracts.is_empty() || contract.is_some_and(|id| self.contracts.contains(&id)))
            && (self.topics.is_empty() || self.topics.iter().any(|topics| topics.take(&body.topics)))
    }
}

impl Topics {
    fn take(&self, topics: &[ScVal]) -> bool {
        let long_enough = topics.len() == self.segments.len() || self.open && topics.len() > self.segments.len();
        long_enough
            && self.segments.iter().zip(topics).all(|(segment, topic)| match segment {
                Segment::Any => true,
                Segment::Exactly(value) => **value == *topic,
            })
    }
}

fn filters(given: &[Filter]) -> Result<Vec<Matcher>, RpcError> {
    let invalid = |what: &str| Err(RpcError::InvalidParams(format!("invalid filter: {what}")));
    if given.len() > MAX_FILTERS {
        return invalid("maximum 5 filters per request");
    }
    let mut matchers = Vec::new();
    for filter in given {
        match filter.kind.as_deref() {
            None | Some("" | "contract") => {}
            // System events do not occur here: such a filter takes nothing, but every filter takes something.
            _ => return invalid("type must be contract"),
        }
        if filter.contract_ids.len() > MAX_IDS || filter.topics.len() > MAX_TOPICS {
            return invalid("maximum 5 contract IDs and 5 topics per filter");
        }
        if filter.contract_ids.iter().any(|id| stellar_strkey::Contract::from_string(id).is_err()) {
            return invalid("a contract ID is none");
        }
        let topics = filter.topics.iter().map(|topics| read_topics(topics)).collect::<Result<_, _>>()?;
        matchers.push(Matcher { contracts: filter.contract_ids.clone(), topics });
    }
    Ok(matchers)
}

fn read_topics(given: &[String]) -> Result<Topics, RpcError> {
    let (open, given) = match given {
        [start @ .., last] if last == "**" => (true, start),
        all => (false, all),
    };
    if given.len() > MAX_SEGMENTS || given.is_empty() && !open {
        return Err(RpcError::InvalidParams("invalid filter: a topic has 1 to 4 segments".into()));
    }
    let mut segments = Vec::new();
    for segment in given {
        segments.push(match segment.as_str() {
            "*" => Segment::Any,
            "**" => {
                return Err(RpcError::InvalidParams("invalid filter: ** stands at the end only".into()));
            }
            text => Segment::Exactly(Box::new(
                ScVal::from_xdr_base64(text, LIMITS)
                    .map_err(|_| RpcError::InvalidParams("invalid filter: a topic segment is no ScVal".into()))?,
            )),
        });
    }
    Ok(Topics { segments, open })
}

/// `1970-01-01T00:00:00Z`, from unix seconds.
fn iso8601(unix: u64) -> String {
    let (days, seconds) = (unix / 86_400, unix % 86_400);
    let (year, month, day) = civil(days);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", seconds / 3_600, seconds / 60 % 60, seconds % 60)
}

/// Days since 1970 as a date of the Gregorian calendar (Hinnant's `civil_from_days`).
fn civil(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (year_of_era + era * 400 + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_calendar_times() {
        assert_eq!(iso8601(0), "1970-01-01T00:00:00Z");
        assert_eq!(iso8601(951_827_696), "2000-02-29T12:34:56Z");
        assert_eq!(iso8601(1_796_169_600), "2026-12-02T00:00:00Z");
    }

    #[test]
    fn places_are_read_as_written() {
        let place = Place::new(1_005, 2, 3);
        assert_eq!(Place::parse(&place.text()), Some(place));
        assert!(place < Place::end(1_005) && Place::end(1_005) < Place::new(1_006, 1, 0));
        assert_eq!(Place::end(1_005).ledger(), 1_005);
        for bad in ["", "1", "-", "1-", "+1-2", "1-2-3", "99999999999999999999-1"] {
            assert_eq!(Place::parse(bad), None, "{bad}");
        }
    }
}
