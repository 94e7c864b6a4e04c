//! The catalog client against real HTTP servers, one per dialect and misbehaviour.
#![allow(clippy::disallowed_methods, reason = "the other side of the wire is not part of the simulated world")]

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper_util::rt::TokioIo;

use super::*;
use crate::http::{Client, Destination, Limits, Tls};

type Parameters = BTreeMap<String, String>;

struct Server {
    base: String,
    /// Path and query of every request, in order.
    seen: Arc<Mutex<Vec<String>>>,
}

impl Server {
    /// Answers with status and body; status 0 never answers.
    async fn start(answer: impl Fn(&str, &Parameters) -> (u16, String) + Send + Sync + 'static) -> Server {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base = format!("http://{}", listener.local_addr().unwrap());
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (answer, log) = (Arc::new(answer), seen.clone());
        tokio::spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else { return };
                let (answer, log) = (answer.clone(), log.clone());
                let service = hyper::service::service_fn(move |request: http::Request<hyper::body::Incoming>| {
                    let query = request.uri().query().unwrap_or_default();
                    let parameters = url::form_urlencoded::parse(query.as_bytes()).into_owned().collect::<Parameters>();
                    log.lock().unwrap().push(request.uri().to_string());
                    let (status, body) = answer(request.uri().path(), &parameters);
                    async move {
                        if status == 0 {
                            std::future::pending::<()>().await;
                        }
                        let mut response = http::Response::new(Full::new(Bytes::from(body)));
                        *response.status_mut() = http::StatusCode::from_u16(status).unwrap();
                        if (300..400).contains(&status) {
                            response.headers_mut().insert("location", "/elsewhere".parse().unwrap());
                        }
                        Ok::<_, Infallible>(response)
                    }
                });
                tokio::spawn(async move {
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        Server { base, seen }
    }

    fn catalog(&self) -> Catalog {
        self.catalog_at("", Duration::from_secs(10))
    }

    fn catalog_at(&self, path: &str, timeout: Duration) -> Catalog {
        let (world, _) = crate::ports::machine::world();
        let limits = Limits { timeout, max_response_bytes: 1 << 20 };
        let client = Client::new(world, Tls::Plain, Destination::Operator, limits);
        Catalog::new(client, &format!("{}{path}", self.base)).unwrap()
    }

    fn seen(&self) -> Vec<String> {
        self.seen.lock().unwrap().clone()
    }
}

const USDC: &str = "CBIELTK6YBZJU5UP2WWQEUCYKLPU6AUNZ2BQ4WWFEIE3USCIHMXQDAMA";

fn option(pay_to: &str) -> String {
    format!(
        r#"{{"scheme":"exact","network":"stellar:testnet","amount":"10000","asset":"{USDC}","payTo":"{pay_to}","maxTimeoutSeconds":60,"extra":{{"areFeesSponsored":true}}}}"#
    )
}

fn item(name: &str, pay_to: &str) -> String {
    format!(
        r#"{{"resource":"https://seller.example/mcp","type":"mcp","x402Version":2,"accepts":[{}],"lastUpdated":1,"extensions":{{"bazaar":{{"info":{{"input":{{"type":"mcp","toolName":"{name}","inputSchema":{{}}}}}}}}}}}}"#,
        option(pay_to)
    )
}

fn reference(name: &str) -> ResourceRef {
    ResourceRef::new(Kind::Mcp, "https://seller.example/mcp", Some(name)).unwrap()
}

/// A list of `count` items paged by offset, as the foundation's specification has it.
fn by_offset(count: u64, max: u64, parameters: &Parameters) -> (u16, String) {
    let number = |name: &str, default| parameters.get(name).map_or(default, |text| text.parse::<u64>().unwrap());
    let (offset, limit) = (number("offset", 0), number("limit", 20).min(max));
    let items: Vec<String> = (offset..(offset + limit).min(count)).map(|n| item(&format!("t{n}"), "GA")).collect();
    (
        200,
        format!(
            r#"{{"x402Version":2,"items":[{}],"pagination":{{"limit":{limit},"offset":{offset},"total":{count}}}}}"#,
            items.join(",")
        ),
    )
}

fn query(text: &str) -> SearchQuery {
    SearchQuery { query: Some(text.to_owned()), ..SearchQuery::default() }
}

fn names(page: &Page) -> Vec<&str> {
    page.items.iter().filter_map(|listing| listing.reference.tool_name.as_deref()).collect()
}

#[tokio::test]
async fn the_base_keeps_its_path_and_every_filter_is_sent() {
    let server = Server::start(|_, _| (200, r#"{"resources":[]}"#.to_owned())).await;
    let catalog = server.catalog_at("/platform/v2/x402/", Duration::from_secs(10));
    let all = SearchQuery {
        kind: Some(Kind::Mcp),
        network: Some("stellar:testnet".parse().unwrap()),
        scheme: Some("exact".into()),
        pay_to: Some("GA".into()),
        asset: Some(USDC.parse().unwrap()),
        extensions: vec!["bazaar".into(), "x".into()],
        limit: Some(7),
        ..query("weather & wind")
    };
    catalog.search(&all).await.unwrap();
    catalog.search(&SearchQuery::default()).await.unwrap();
    let filters = format!(
        "type=mcp&network=stellar%3Atestnet&scheme=exact&payTo=GA&asset={USDC}&extensions=bazaar&extensions=x&limit=7"
    );
    assert_eq!(
        server.seen(),
        [
            format!("/platform/v2/x402/discovery/search?query=weather+%26+wind&{filters}"),
            "/platform/v2/x402/discovery/resources?limit=20".to_owned(),
        ]
    );
}

#[tokio::test]
async fn a_malformed_item_never_fails_the_page() {
    let body = format!(
        r#"{{"resources":[{},7,null,{{"a":1,"a":1}},{{"x402Version":1}},{}],"partialResults":true,"pagination":null}}"#,
        item("good", "GA"),
        item("also", "GA").replace("10000", "1e4"),
    );
    let server = Server::start(move |_, _| (200, body.clone())).await;
    let page = server.catalog().search(&query("x")).await.unwrap();
    assert_eq!(names(&page), ["good"]);
    let reasons: Vec<&str> = page.skipped.iter().map(|skip| skip.0).collect();
    assert_eq!(reasons, ["not_an_object", "not_an_object", "duplicate_member", "x402_version", "no_usable_option"]);
    assert!(page.partial_results && page.cursor.is_none());
    assert_eq!(page.items[0].raw.get(), item("good", "GA"));
}

#[tokio::test]
async fn a_filter_that_the_catalog_ignores_is_applied_here_and_reported() {
    let other = item("other", "GB");
    let body =
        format!(r#"{{"items":[{},{other}],"pagination":{{"limit":20,"offset":0,"total":2}}}}"#, item("mine", "GA"));
    let server = Server::start(move |_, _| (200, body.clone())).await;
    let wanted = SearchQuery { pay_to: Some("GA".into()), ..SearchQuery::default() };
    let page = server.catalog().search(&wanted).await.unwrap();
    assert_eq!((names(&page), page.dropped), (vec!["mine"], 1));
    assert_eq!(page.items[0].warnings, [warnings::FILTER_NOT_APPLIED]);
    let page = server.catalog().search(&SearchQuery::default()).await.unwrap();
    assert_eq!((page.items.len(), page.dropped), (2, 0));
    assert!(page.items.iter().all(|listing| listing.warnings.is_empty()));
}

#[tokio::test]
async fn a_limit_that_is_refused_is_lowered_and_remembered() {
    let server = Server::start(|_, parameters| match parameters["limit"].parse::<u64>().unwrap() {
        51.. => (400, r#"{"error":"invalid_limit"}"#.to_owned()),
        _ => by_offset(400, 50, parameters),
    })
    .await;
    let catalog = server.catalog();
    let page = catalog.search(&SearchQuery { limit: Some(10_000), ..Default::default() }).await.unwrap();
    assert_eq!((page.limit, page.items.len()), (50, 50));
    catalog.search(&SearchQuery { limit: Some(200), ..Default::default() }).await.unwrap();
    let limits: Vec<String> = server.seen().iter().map(|uri| uri.rsplit('=').next().unwrap().to_owned()).collect();
    assert_eq!(limits, ["200", "100", "50", "50"]);
}

#[tokio::test]
async fn a_limit_that_is_lowered_in_silence_is_echoed() {
    let server = Server::start(|_, parameters| by_offset(400, 30, parameters)).await;
    let page = server.catalog().search(&SearchQuery { limit: Some(200), ..Default::default() }).await.unwrap();
    assert_eq!((page.limit, page.items.len()), (30, 30));
}

#[tokio::test]
async fn a_catalog_that_ignores_the_limit_does_not_flood_the_agent() {
    let items = vec![item("same", "GA"); 1_000].join(",");
    let body = format!(r#"{{"items":[{items}]}}"#);
    let server = Server::start(move |_, _| (200, body.clone())).await;
    let page = server.catalog().search(&SearchQuery { limit: Some(5), ..Default::default() }).await.unwrap();
    assert_eq!((page.items.len(), page.partial_results), (5, true));
}

#[tokio::test]
async fn paging_by_offset_shows_every_item_once() {
    let server = Server::start(|_, parameters| by_offset(95, 30, parameters)).await;
    let catalog = server.catalog();
    let mut query = SearchQuery { limit: Some(40), ..Default::default() };
    let mut all = Vec::new();
    loop {
        let page = catalog.search(&query).await.unwrap();
        all.extend(names(&page).into_iter().map(str::to_owned));
        match page.cursor {
            Some(cursor) => query.cursor = Some(cursor),
            None => break,
        }
    }
    assert_eq!(all, (0..95).map(|n| format!("t{n}")).collect::<Vec<_>>());
    assert_eq!(server.seen().len(), 4);
}

#[tokio::test]
async fn the_catalogs_cursor_comes_back_to_it_unchanged() {
    const CURSOR: &str = "c1.eyJ/+=.\u{e4} &?";
    let server = Server::start(|_, parameters| {
        let cursor = if parameters.contains_key("cursor") {
            "null".to_owned()
        } else {
            crate::json::raw(CURSOR).get().to_owned()
        };
        assert!(parameters.get("cursor").is_none_or(|sent| sent == CURSOR));
        (200, format!(r#"{{"resources":[{}],"pagination":{{"limit":1,"cursor":{cursor}}}}}"#, item("a", "GA")))
    })
    .await;
    let catalog = server.catalog();
    let first = catalog.search(&query("a")).await.unwrap();
    let second = catalog.search(&SearchQuery { cursor: first.cursor.clone(), ..query("a") }).await.unwrap();
    assert_eq!(second.cursor, None);
    let other = catalog.search(&SearchQuery { cursor: first.cursor, ..query("b") }).await;
    assert!(matches!(other, Err(CatalogError::Invalid { field: "cursor", .. })), "a cursor of another query");
    assert_eq!(server.seen().len(), 2);
}

#[tokio::test]
async fn a_cursor_that_the_catalog_forgot_is_the_agents_argument() {
    let server = Server::start(|_, _| (400, r#"{"error":"invalid_cursor"}"#.to_owned())).await;
    let got = server.catalog().search(&query("a")).await;
    assert!(matches!(got, Err(CatalogError::Invalid { field: "cursor", .. })));
    assert_eq!(server.seen().len(), 1, "not tried again with other limits");
}

#[tokio::test]
async fn resolve_uses_the_lookup_where_there_is_one() {
    let server = Server::start(|path, parameters| match (path, parameters["toolName"].as_str()) {
        ("/discovery/resource", "gone") => (404, r#"{"error":"not_found"}"#.to_owned()),
        ("/discovery/resource", "off") => {
            let off = item("off", "GA").replace("\"lastUpdated\"", "\"status\":\"inactive\",\"lastUpdated\"");
            (200, format!(r#"{{"x402Version":2,"resource":{off}}}"#))
        }
        ("/discovery/resource", "bad") => (200, r#"{"resource":{"resource":"https://seller.example/mcp"}}"#.into()),
        ("/discovery/resource", name) => (200, format!(r#"{{"x402Version":2,"resource":{}}}"#, item(name, "GA"))),
        _ => (500, String::new()),
    })
    .await;
    let catalog = server.catalog();
    let listing = catalog.resolve(&reference("get weather")).await.unwrap();
    assert_eq!(listing.raw.get(), item("get weather", "GA"));
    assert_eq!(
        server.seen(),
        ["/discovery/resource?type=mcp&url=https%3A%2F%2Fseller.example%2Fmcp&toolName=get+weather"]
    );
    for inactive in ["gone", "off"] {
        assert!(matches!(catalog.resolve(&reference(inactive)).await, Err(CatalogError::NotListed)), "{inactive}");
    }
    assert!(matches!(catalog.resolve(&reference("bad")).await, Err(CatalogError::Protocol(_))));
}

#[tokio::test]
async fn a_lookup_that_finds_a_neighbour_does_not_stand_for_the_entry() {
    let server = Server::start(|path, parameters| match path {
        "/discovery/resource" => (200, format!(r#"{{"resource":{}}}"#, item("neighbour", "GB"))),
        _ => by_offset(3, 50, parameters),
    })
    .await;
    let listing = server.catalog().resolve(&reference("t2")).await.unwrap();
    assert_eq!(listing.reference, reference("t2"));
}

#[tokio::test]
async fn without_a_lookup_search_and_list_find_the_entry() {
    let server = Server::start(|path, parameters| match path {
        "/discovery/resource" => (404, "<html>".to_owned()),
        "/discovery/search" if parameters["query"] == "t7" => {
            (200, format!(r#"{{"resources":[{}]}}"#, item("t7", "GA")))
        }
        "/discovery/search" => (404, String::new()),
        _ => by_offset(250, 100, parameters),
    })
    .await;
    let catalog = server.catalog();
    assert_eq!(catalog.resolve(&reference("t7")).await.unwrap().reference, reference("t7"));
    assert_eq!(catalog.resolve(&reference("t249")).await.unwrap().reference, reference("t249"));
    assert!(matches!(catalog.resolve(&reference("t250")).await, Err(CatalogError::NotListed)));
    let lookups = server.seen().iter().filter(|uri| uri.starts_with("/discovery/resource?")).count();
    assert_eq!(lookups, 1, "a missing lookup is remembered");
}

#[tokio::test]
async fn a_catalog_too_long_to_read_is_no_proof_of_absence() {
    let server = Server::start(|path, parameters| match path {
        "/discovery/resources" => by_offset(1_000_000, 5, parameters),
        _ => (404, String::new()),
    })
    .await;
    assert!(matches!(server.catalog().resolve(&reference("none")).await, Err(CatalogError::Protocol(_))));
    assert!(server.seen().len() < 30, "bounded");
}

#[tokio::test]
async fn a_catalog_that_fails_is_an_error_and_never_an_absence() {
    let big = "x".repeat(2 << 20);
    for (status, body, timeout) in [
        (500, "", false),
        (502, "<html>", false),
        (429, r#"{"error":"slow down please"}"#, false),
        (401, r#"{"error":"unauthorized"}"#, false),
        (302, "", false),
        (200, "<html>", false),
        (200, r#"{"items":{}}"#, false),
        (200, r#"{"items":[],"items":[]}"#, false),
        (200, big.as_str(), false),
        (504, "", true),
        (0, "", true),
    ] {
        let body = body.to_owned();
        let server = Server::start(move |_, _| (status, body.clone())).await;
        let catalog = server.catalog_at("", Duration::from_millis(300));
        for got in [
            catalog.search(&query("x")).await.map(|_| ()),
            catalog.search(&SearchQuery::default()).await.map(|_| ()),
            catalog.resolve(&reference("x")).await.map(|_| ()),
        ] {
            match got {
                Err(CatalogError::Timeout) => assert!(timeout, "{status}"),
                Err(CatalogError::Protocol(_)) => assert!(!timeout, "{status}"),
                other => panic!("{status}: {other:?}"),
            }
        }
        assert!(server.seen().iter().all(|uri| !uri.starts_with("/elsewhere")), "no redirect is followed");
    }
}

#[tokio::test]
async fn a_catalog_that_nobody_serves_is_an_error() {
    let server = Server { base: "http://127.0.0.1:1".into(), seen: Arc::default() };
    assert!(matches!(server.catalog().search(&query("x")).await, Err(CatalogError::Protocol(_))));
}

#[tokio::test]
async fn a_recipient_that_moves_is_reported() {
    let moved = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let switch = moved.clone();
    let server = Server::start(move |_, _| {
        let pay_to = if switch.load(std::sync::atomic::Ordering::SeqCst) { "GB" } else { "GA" };
        (200, format!(r#"{{"resource":{}}}"#, item("t", pay_to)))
    })
    .await;
    let catalog = server.catalog();
    for _ in 0..2 {
        assert!(catalog.resolve(&reference("t")).await.unwrap().warnings.is_empty());
    }
    moved.store(true, std::sync::atomic::Ordering::SeqCst);
    assert_eq!(catalog.resolve(&reference("t")).await.unwrap().warnings, [warnings::RECIPIENT_CHANGED]);
}

#[tokio::test]
async fn two_entries_under_one_reference_are_marked() {
    let body = format!(r#"{{"items":[{},{},{}]}}"#, item("a", "GA"), item("a", "GB"), item("b", "GA"));
    let server = Server::start(move |_, _| (200, body.clone())).await;
    let page = server.catalog().search(&SearchQuery::default()).await.unwrap();
    let ambiguous: Vec<bool> =
        page.items.iter().map(|listing| listing.warnings.contains(&warnings::AMBIGUOUS_REFERENCE)).collect();
    assert_eq!(ambiguous, [true, true, false]);
}

#[tokio::test]
async fn an_option_that_stands_twice_is_no_moved_recipient() {
    let twice = item("t", "GA").replace(&option("GA"), &format!("{},{}", option("GA"), option("GB")));
    let server = Server::start(move |_, _| (200, format!(r#"{{"resource":{twice}}}"#))).await;
    let catalog = server.catalog();
    for _ in 0..2 {
        assert_eq!(catalog.resolve(&reference("t")).await.unwrap().warnings, [warnings::AMBIGUOUS_OPTION]);
    }
}

#[test]
fn a_base_that_is_no_plain_url_is_refused() {
    let (world, _) = crate::ports::machine::world();
    let client = Client::new(world, Tls::Plain, Destination::Operator, Limits::default());
    for bad in [
        "",
        "facilitator.example",
        "ftp://a.example",
        "https://u:p@a.example",
        "https://a.example/?x=1",
        "https://a.example/#x",
    ] {
        assert!(matches!(Catalog::new(client.clone(), bad), Err(CatalogError::Invalid { .. })), "{bad}");
    }
}
