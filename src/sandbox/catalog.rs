//! A Bazaar catalog as openx402's facilitator serves it: `/discovery/resources`, `/discovery/search`,
//! `/discovery/resource`. Items are kept and handed out byte for byte; whoever runs it can change one at any time, as
//! sellers do.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aws_lc_rs::hmac;
use axum::Router;
use axum::extract::{RawQuery, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Serialize;
use serde_json::json;
use serde_json::value::RawValue;
use url::{Url, form_urlencoded};

use crate::json::{self as strict, elements, member, string};
use crate::money::Amount;
use crate::ports::World;

const ITEM: strict::Limits = strict::Limits { bytes: 1024 * 1024, depth: 64 };
const DEFAULT_LIMIT: usize = 20;
const MAX_LIMIT: usize = 50;
const CURSOR_LIFE_MS: u64 = 15 * 60 * 1_000;
const MAX_QUERY: usize = 512;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CatalogError {
    #[error("the item {0}")]
    Json(#[from] strict::JsonError),
    #[error("the item has no usable {0}")]
    Item(&'static str),
}

pub struct Catalog {
    world: World,
    cursor_key: hmac::Key,
    content: Mutex<Content>,
}

#[derive(Default)]
struct Content {
    items: Vec<Item>,
    /// Raised with every change; a cursor is good for one generation.
    generation: u64,
}

struct Item {
    raw: Box<RawValue>,
    kind: String,
    url: String,
    tool: Option<String>,
    offers: Vec<ItemOffer>,
    extensions: BTreeSet<String>,
    /// What a query is matched against, in lower case.
    text: String,
}

struct ItemOffer {
    scheme: String,
    network: String,
    asset: String,
    pay_to: String,
    amount: Option<Amount>,
}

impl Catalog {
    pub fn new(world: World) -> Arc<Catalog> {
        let secret: [u8; 32] = world.random();
        let cursor_key = hmac::Key::new(hmac::HMAC_SHA256, &secret);
        Arc::new(Catalog { world, cursor_key, content: Mutex::default() })
    }

    /// Adds an item, or puts it in the place of the one with the same URL, type and tool.
    pub fn put(&self, item: &str) -> Result<(), CatalogError> {
        let item = Item::parse(item.as_bytes())?;
        let mut content = self.content();
        content.generation += 1;
        match content.items.iter_mut().find(|old| old.key() == item.key()) {
            Some(old) => *old = item,
            None => content.items.push(item),
        }
        Ok(())
    }

    /// One item per line; gives how many there were.
    pub fn put_lines(&self, lines: &str) -> Result<usize, CatalogError> {
        let mut count = 0;
        for line in lines.lines().filter(|line| !line.trim().is_empty()) {
            self.put(line)?;
            count += 1;
        }
        Ok(count)
    }

    /// Whether there was such an item.
    pub fn remove(&self, url: &str, tool: Option<&str>) -> bool {
        let mut content = self.content();
        let before = content.items.len();
        content.items.retain(|item| item.url != url || item.tool.as_deref() != tool);
        content.generation += 1;
        content.items.len() < before
    }

    /// The item as it is handed out now.
    pub fn item(&self, url: &str, tool: Option<&str>) -> Option<Box<RawValue>> {
        let content = self.content();
        content.items.iter().find(|i| i.url == url && i.tool.as_deref() == tool).map(|i| i.raw.clone())
    }

    pub fn router(self: &Arc<Catalog>) -> Router {
        Router::new()
            .route("/discovery/resources", get(resources))
            .route("/discovery/search", get(search))
            .route("/discovery/resource", get(resource))
            .with_state(self.clone())
    }

    fn content(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sign_cursor(&self, body: &str) -> String {
        let tag = hmac::sign(&self.cursor_key, body.as_bytes());
        format!("c1.{}.{}", URL_SAFE_NO_PAD.encode(body), URL_SAFE_NO_PAD.encode(tag))
    }

    /// The offset in a cursor of ours that was made for these filters and this content, and is not too old.
    fn open_cursor(&self, cursor: &str, filters: &str, generation: u64) -> Option<usize> {
        let (body, tag) = cursor.strip_prefix("c1.")?.split_once('.')?;
        let (body, tag) = (URL_SAFE_NO_PAD.decode(body).ok()?, URL_SAFE_NO_PAD.decode(tag).ok()?);
        hmac::verify(&self.cursor_key, &body, &tag).ok()?;
        let body: serde_json::Value = serde_json::from_slice(&body).ok()?;
        let fresh = body["e"].as_u64()? > self.world.unix_ms();
        let same = body["f"].as_str()? == filters && body["g"].as_u64()? == generation;
        if fresh && same { usize::try_from(body["o"].as_u64()?).ok() } else { None }
    }
}

impl Item {
    fn parse(text: &[u8]) -> Result<Item, CatalogError> {
        let raw = strict::check(text, ITEM)?;
        let text_of = |raw: &RawValue, name: &str| member(raw, name).and_then(string).map(Cow::into_owned);
        let need = |name: &'static str| text_of(raw, name).ok_or(CatalogError::Item(name));
        let (url, kind) = (need("resource")?, need("type")?);
        let extensions = member(raw, "extensions");
        let input = extensions
            .and_then(|e| member(e, "bazaar"))
            .and_then(|b| member(b, "info"))
            .and_then(|info| member(info, "input"));
        let tool = input.and_then(|input| text_of(input, "toolName"));
        if kind == "mcp" && tool.is_none() {
            return Err(CatalogError::Item("extensions.bazaar.info.input.toolName"));
        }
        let offers = member(raw, "accepts").and_then(elements).ok_or(CatalogError::Item("accepts"))?;
        let offers = offers
            .into_iter()
            .map(|offer| {
                let field = |name: &str| text_of(offer, name).unwrap_or_default();
                ItemOffer {
                    scheme: field("scheme"),
                    network: field("network"),
                    asset: field("asset"),
                    pay_to: field("payTo"),
                    amount: field("amount").parse().ok(),
                }
            })
            .collect();
        let mut words: Vec<String> =
            ["resource", "description", "serviceName"].iter().filter_map(|name| text_of(raw, name)).collect();
        words.extend(input.and_then(|input| text_of(input, "description")));
        words.extend(tool.clone());
        let tags = member(raw, "tags").and_then(elements).unwrap_or_default();
        words.extend(tags.into_iter().filter_map(string).map(Cow::into_owned));
        let extensions = extensions.map(strict::members).transpose()?.unwrap_or_default();
        Ok(Item {
            raw: raw.to_owned(),
            kind,
            url,
            tool,
            offers,
            extensions: extensions.into_iter().map(|(name, _)| name.into_owned()).collect(),
            text: words.join(" ").to_lowercase(),
        })
    }

    fn key(&self) -> (&str, &str, Option<&str>) {
        (&self.kind, &self.url, self.tool.as_deref())
    }

    /// How many words of the query the item has; zero is no hit.
    fn score(&self, words: &[String]) -> usize {
        words.iter().filter(|word| self.text.contains(word.as_str())).count()
    }
}

/// What a request asks for, in the order of `Filters::canonical`.
#[derive(Default)]
struct Filters {
    kind: Option<String>,
    network: Option<String>,
    scheme: Option<String>,
    pay_to: Option<String>,
    asset: Option<String>,
    max_price: Option<Amount>,
    extensions: BTreeSet<String>,
}

#[derive(Default)]
struct Params {
    filters: Filters,
    query: Option<String>,
    mode: Option<String>,
    limit: Option<String>,
    offset: Option<String>,
    cursor: Option<String>,
    url: Option<String>,
    tool: Option<String>,
}

/// HTTP 400 with `{error}`, as openx402 answers.
struct Bad(&'static str);
impl IntoResponse for Bad {
    fn into_response(self) -> Response {
        (StatusCode::BAD_REQUEST, axum::Json(json!({"error": self.0}))).into_response()
    }
}

impl Params {
    /// A parameter that is not known here is ignored; one that is known is applied or refused.
    fn parse(query: Option<String>) -> Result<Params, Bad> {
        let mut params = Params::default();
        for (name, value) in form_urlencoded::parse(query.unwrap_or_default().as_bytes()) {
            let value = value.into_owned();
            let filters = &mut params.filters;
            let slot = match name.as_ref() {
                "type" => &mut filters.kind,
                "network" => &mut filters.network,
                "scheme" => &mut filters.scheme,
                "payTo" => &mut filters.pay_to,
                "asset" => &mut filters.asset,
                "extensions" => {
                    filters.extensions.extend(value.split(',').filter(|e| !e.is_empty()).map(str::to_owned));
                    continue;
                }
                "maxPrice" => {
                    filters.max_price = Some(value.parse().map_err(|_| Bad("invalid_filter"))?);
                    continue;
                }
                "query" => &mut params.query,
                "mode" => &mut params.mode,
                "limit" => &mut params.limit,
                "offset" => &mut params.offset,
                "cursor" => &mut params.cursor,
                "url" => &mut params.url,
                "toolName" => &mut params.tool,
                _ => continue,
            };
            if slot.replace(value).is_some() {
                return Err(Bad("invalid_filter"));
            }
        }
        if params.filters.kind.as_deref().is_some_and(|kind| kind != "http" && kind != "mcp") {
            return Err(Bad("invalid_filter"));
        }
        if params.filters.max_price.is_some() && params.filters.asset.is_none() {
            return Err(Bad("invalid_filter"));
        }
        Ok(params)
    }

    fn limit(&self) -> Result<usize, Bad> {
        let Some(limit) = &self.limit else { return Ok(DEFAULT_LIMIT) };
        match limit.parse::<usize>() {
            Ok(limit) if limit > 0 => Ok(limit.min(MAX_LIMIT)),
            _ => Err(Bad("invalid_filter")),
        }
    }

    fn offset(&self) -> Result<usize, Bad> {
        self.offset.as_deref().map_or(Ok(0), |offset| offset.parse().map_err(|_| Bad("invalid_filter")))
    }

    /// What a cursor is bound to.
    fn canonical(&self) -> String {
        let f = &self.filters;
        json!([
            f.kind,
            f.network,
            f.scheme,
            f.pay_to,
            f.asset,
            f.max_price.map(|m| m.to_string()),
            f.extensions,
            self.query,
            self.mode
        ])
        .to_string()
    }
}

impl Filters {
    /// One offer must meet all that is asked of offers: a price in one asset does not excuse another asset.
    fn take(&self, item: &Item) -> bool {
        let equal = |wanted: &Option<String>, have: &str| wanted.as_deref().is_none_or(|wanted| wanted == have);
        let offer = |offer: &ItemOffer| {
            equal(&self.network, &offer.network)
                && equal(&self.scheme, &offer.scheme)
                && equal(&self.pay_to, &offer.pay_to)
                && equal(&self.asset, &offer.asset)
                && self.max_price.is_none_or(|most| offer.amount.is_some_and(|amount| amount <= most))
        };
        equal(&self.kind, &item.kind) && self.extensions.is_subset(&item.extensions) && item.offers.iter().any(offer)
    }
}

struct Page {
    items: Vec<Box<RawValue>>,
    limit: usize,
    offset: usize,
    total: usize,
    cursor: Option<String>,
}

impl Catalog {
    fn page(&self, params: &Params) -> Result<Page, Bad> {
        let (limit, bound_to) = (params.limit()?, params.canonical());
        let content = self.content();
        let offset = match &params.cursor {
            Some(cursor) => self.open_cursor(cursor, &bound_to, content.generation).ok_or(Bad("invalid_cursor"))?,
            None => params.offset()?,
        };
        let words: Vec<String> =
            params.query.iter().flat_map(|q| q.split_whitespace()).map(str::to_lowercase).collect();
        let mut hits: Vec<(usize, &Item)> = content
            .items
            .iter()
            .filter(|item| params.filters.take(item))
            .map(|item| (item.score(&words), item))
            .filter(|(score, _)| words.is_empty() || *score > 0)
            .collect();
        // Stable: equal scores stay in the catalog's order, so that pages do not overlap.
        hits.sort_by_key(|(score, _)| std::cmp::Reverse(*score));
        let total = hits.len();
        let items: Vec<_> = hits.into_iter().skip(offset).take(limit).map(|(_, item)| item.raw.clone()).collect();
        let next = offset.saturating_add(items.len());
        let cursor = (next < total && !items.is_empty()).then(|| {
            let until = self.world.unix_ms() + CURSOR_LIFE_MS;
            self.sign_cursor(&json!({"e": until, "f": bound_to, "g": content.generation, "o": next}).to_string())
        });
        Ok(Page { items, limit, offset, total, cursor })
    }
}

async fn resources(State(catalog): State<Arc<Catalog>>, RawQuery(query): RawQuery) -> Result<Response, Bad> {
    let mut params = Params::parse(query)?;
    params.query = None;
    let page = catalog.page(&params)?;
    Ok(answer(&Listed {
        x402_version: 2,
        items: &page.items,
        pagination: json!({
            "limit": page.limit, "offset": page.offset, "total": page.total, "cursor": page.cursor,
        }),
        partial_results: false,
    }))
}

async fn search(State(catalog): State<Arc<Catalog>>, RawQuery(query): RawQuery) -> Result<Response, Bad> {
    let mut params = Params::parse(query)?;
    let query = params.query.take().filter(|query| !query.trim().is_empty()).ok_or(Bad("query_required"))?;
    params.query = Some(query.chars().take(MAX_QUERY).collect());
    if params.mode.as_deref().is_some_and(|mode| !["lexical", "semantic", "hybrid"].contains(&mode)) {
        return Err(Bad("invalid_mode"));
    }
    let page = catalog.page(&params)?;
    let mut response = answer(&Searched {
        x402_version: 2,
        resources: &page.items,
        partial_results: false,
        pagination: json!({"limit": page.limit, "cursor": page.cursor}),
    });
    if let Ok(session) = uuid_v4(catalog.world.random()).parse() {
        response.headers_mut().insert("x-search-session-id", session);
    }
    Ok(response)
}

async fn resource(State(catalog): State<Arc<Catalog>>, RawQuery(query): RawQuery) -> Result<Response, Bad> {
    let params = Params::parse(query)?;
    let kind = params.filters.kind.as_deref().ok_or(Bad("invalid_filter"))?;
    let url = params.url.as_deref().and_then(canonical_url).ok_or(Bad("invalid_filter"))?;
    let tool = params.tool.as_deref();
    if (kind == "mcp") != tool.is_some() {
        return Err(Bad("invalid_filter"));
    }
    let content = catalog.content();
    let found = content.items.iter().find(|item| {
        item.kind == kind
            && item.tool.as_deref() == tool
            && canonical_url(&item.url).is_some_and(|listed| listed == url)
    });
    Ok(match found {
        Some(item) => answer(&One { x402_version: 2, resource: &item.raw }),
        None => (StatusCode::NOT_FOUND, axum::Json(json!({"error": "not_found"}))).into_response(),
    })
}

// Types of their own, because `json!` would not keep the items' bytes.

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Listed<'a> {
    x402_version: u8,
    items: &'a [Box<RawValue>],
    pagination: serde_json::Value,
    partial_results: bool,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Searched<'a> {
    x402_version: u8,
    resources: &'a [Box<RawValue>],
    partial_results: bool,
    pagination: serde_json::Value,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct One<'a> {
    x402_version: u8,
    resource: &'a RawValue,
}

fn answer(body: &impl Serialize) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], strict::raw(body).get().to_owned()).into_response()
}

/// http, https or mcp without credentials, at most 2,048 characters; query, fragment and a last `/` do not count.
fn canonical_url(url: &str) -> Option<String> {
    let mut parsed = Url::parse(url).ok().filter(|_| url.len() <= 2_048)?;
    let plain = parsed.username().is_empty() && parsed.password().is_none();
    if !plain || !["http", "https", "mcp"].contains(&parsed.scheme()) {
        return None;
    }
    parsed.set_query(None);
    parsed.set_fragment(None);
    Some(parsed.as_str().trim_end_matches('/').to_owned())
}

fn uuid_v4(mut bytes: [u8; 16]) -> String {
    bytes[6] = (bytes[6] & 0x0f) | 0x40;
    bytes[8] = (bytes[8] & 0x3f) | 0x80;
    let hex = hex::encode(bytes);
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ports::machine;

    const ASSET: &str = "CBIELTK6YBZJU5UP2WWQEUCYKLPU6AUNZ2BQ4WWFEIE3USCIHMXQDAMA";

    fn item(n: usize, tool: &str, amount: &str) -> String {
        format!(
            r#"{{"resource":"https://seller-{n}.example/mcp","type":"mcp","x402Version":2,"accepts":[{{"scheme":"exact","network":"stellar:testnet","asset":"{ASSET}","amount":"{amount}","payTo":"GPAY{n}","maxTimeoutSeconds":60}}],"lastUpdated":"2026-08-07T19:00:00.000Z","description":"Number {n}","extensions":{{"bazaar":{{"info":{{"input":{{"type":"mcp","toolName":"{tool}","inputSchema":{{ "type": "object" }}}}}}}}}}}}"#
        )
    }

    fn catalog(items: usize) -> Arc<Catalog> {
        let (world, _) = machine::world();
        let catalog = Catalog::new(world);
        for n in 0..items {
            let tool = if n % 2 == 0 { "weather" } else { "rates" };
            catalog.put(&item(n, tool, &(n * 100).to_string())).unwrap();
        }
        catalog
    }

    async fn get(catalog: &Arc<Catalog>, path: &str) -> (u16, String) {
        let (path, query) = path.split_once('?').map_or((path, None), |(p, q)| (p, Some(q.to_owned())));
        let (state, query) = (State(catalog.clone()), RawQuery(query));
        let response = match path {
            "resources" => resources(state, query).await,
            "search" => search(state, query).await,
            _ => resource(state, query).await,
        };
        let response = response.into_response();
        let status = response.status().as_u16();
        let body = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    async fn value(catalog: &Arc<Catalog>, path: &str) -> serde_json::Value {
        let (status, body) = get(catalog, path).await;
        assert_eq!(status, 200, "{path}: {body}");
        serde_json::from_str(&body).unwrap()
    }

    #[tokio::test]
    async fn items_leave_byte_for_byte() {
        let catalog = catalog(3);
        let listed = catalog.item("https://seller-1.example/mcp", Some("rates")).unwrap();
        for path in
            ["resources", "search?query=rates", "resource?type=mcp&url=https://seller-1.example/mcp&toolName=rates"]
        {
            let (_, body) = get(&catalog, path).await;
            assert!(body.contains(listed.get()), "{path}: {body}");
        }
    }

    #[tokio::test]
    async fn every_filter_is_applied_to_one_and_the_same_offer() {
        let catalog = catalog(10);
        for (query, total) in [
            ("", 10),
            ("type=mcp", 10),
            ("type=http", 0),
            ("network=stellar:testnet&scheme=exact", 10),
            ("network=stellar:pubnet", 0),
            ("scheme=upto", 0),
            ("payTo=GPAY3", 1),
            (&format!("asset={ASSET}&maxPrice=300"), 4),
            ("extensions=bazaar", 10),
            ("extensions=bazaar,other", 0),
            ("somethingElse=1", 10),
        ] {
            let found = value(&catalog, &format!("resources?{query}")).await;
            assert_eq!(found["pagination"]["total"], total, "{query}");
        }
    }

    #[tokio::test]
    async fn what_cannot_be_applied_is_refused() {
        let catalog = catalog(3);
        for (path, error) in [
            ("resources?maxPrice=10", "invalid_filter"),
            ("resources?maxPrice=1.5&asset=X", "invalid_filter"),
            ("resources?type=tool", "invalid_filter"),
            ("resources?type=mcp&type=http", "invalid_filter"),
            ("resources?limit=0", "invalid_filter"),
            ("resources?cursor=c1.e30.AAAA", "invalid_cursor"),
            ("search", "query_required"),
            ("search?query=%20", "query_required"),
            ("search?query=a&mode=magic", "invalid_mode"),
            ("resource?type=mcp&url=https://seller-1.example/mcp", "invalid_filter"),
            ("resource?type=mcp&url=ftp://seller-1.example/mcp&toolName=x", "invalid_filter"),
        ] {
            assert_eq!(get(&catalog, path).await, (400, format!(r#"{{"error":"{error}"}}"#)), "{path}");
        }
    }

    #[tokio::test]
    async fn pages_cover_everything_once_and_a_cursor_is_bound_to_its_request_and_content() {
        let catalog = catalog(23);
        let mut seen = Vec::new();
        let mut path = "resources?limit=5".to_owned();
        let mut first_cursor = None;
        loop {
            let page = value(&catalog, &path).await;
            seen.extend(page["items"].as_array().unwrap().iter().map(|i| i["resource"].as_str().unwrap().to_owned()));
            let Some(cursor) = page["pagination"]["cursor"].as_str() else { break };
            first_cursor.get_or_insert(cursor.to_owned());
            path = format!("resources?limit=5&cursor={cursor}");
        }
        assert_eq!(seen.len(), 23);
        assert_eq!(seen.iter().collect::<BTreeSet<_>>().len(), 23);
        let cursor = first_cursor.unwrap();
        assert_eq!(get(&catalog, &format!("resources?scheme=exact&cursor={cursor}")).await.0, 400);
        catalog.put(&item(99, "weather", "1")).unwrap();
        assert_eq!(get(&catalog, &format!("resources?cursor={cursor}")).await.0, 400, "the content has changed");
    }

    #[tokio::test]
    async fn a_limit_above_the_maximum_is_lowered_and_echoed() {
        let page = value(&catalog(60), "resources?limit=200").await;
        assert_eq!(page["pagination"]["limit"], 50);
        assert_eq!(page["items"].as_array().unwrap().len(), 50);
    }

    #[tokio::test]
    async fn search_finds_by_words_and_puts_the_best_first() {
        let catalog = catalog(6);
        let found = value(&catalog, "search?query=rates%203").await;
        assert_eq!(found["resources"][0]["resource"], "https://seller-3.example/mcp");
        assert_eq!(value(&catalog, "search?query=nothing").await["resources"], json!([]));
    }

    #[tokio::test]
    async fn one_resource_is_found_under_every_spelling_of_its_url_or_not_at_all() {
        let catalog = catalog(2);
        for url in ["https://seller-1.example/mcp", "https://SELLER-1.example/mcp/", "https://seller-1.example/mcp?a=1"]
        {
            let found = value(&catalog, &format!("resource?type=mcp&url={url}&toolName=rates")).await;
            assert_eq!(found["resource"]["resource"], "https://seller-1.example/mcp");
        }
        let missing = get(&catalog, "resource?type=mcp&url=https://seller-1.example/mcp&toolName=weather").await;
        assert_eq!(missing, (404, r#"{"error":"not_found"}"#.to_owned()));
    }

    #[tokio::test]
    async fn an_item_can_change_and_go() {
        let catalog = catalog(2);
        catalog.put(&item(1, "rates", "777")).unwrap();
        let found = value(&catalog, "resources").await;
        assert_eq!(found["pagination"]["total"], 2);
        assert_eq!(found["items"][1]["accepts"][0]["amount"], "777");
        assert!(catalog.remove("https://seller-1.example/mcp", Some("rates")));
        assert!(!catalog.remove("https://seller-1.example/mcp", Some("rates")));
        assert_eq!(value(&catalog, "resources").await["pagination"]["total"], 1);
    }

    #[test]
    fn an_item_without_what_identifies_it_is_refused() {
        let (world, _) = machine::world();
        let catalog = Catalog::new(world);
        for broken in ["{}", "[]", r#"{"resource":"https://a.example","type":"mcp","accepts":[]}"#, r#"{"a":1,"a":2}"#]
        {
            assert!(catalog.put(broken).is_err(), "{broken}");
        }
    }
}
