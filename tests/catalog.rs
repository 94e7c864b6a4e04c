//! The agent's catalog client against a catalog that behaves as openx402's: 400 entries, signed cursors, pages of 50.

use std::collections::BTreeSet;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use tollway::catalog::{Catalog, CatalogError, Kind, Listing, ResourceRef, SearchQuery};
use tollway::http::{Client, Destination, Limits, Tls};
use tollway::mcp::serve::serve;
use tollway::ports::machine;
use tollway::sandbox::catalog::Catalog as Served;

const ITEMS: &str = include_str!("data/catalog-items.jsonl");
const TOOL: &str = r#"{"resource":"https://seller.example/mcp","type":"mcp","x402Version":2,"accepts":[{"scheme":"exact","network":"stellar:testnet","amount":"10000","asset":"CBIELTK6YBZJU5UP2WWQEUCYKLPU6AUNZ2BQ4WWFEIE3USCIHMXQDAMA","payTo":"GAOH2NR3A3R2VS6TUE6L75A3OMJ4UKJWEHHNL5GIIEQTS5RVZEK5LAP4","maxTimeoutSeconds":60,"extra":{"areFeesSponsored":true}}],"lastUpdated":1,"extensions":{"bazaar":{"info":{"input":{"type":"mcp","toolName":"zürich weather","inputSchema":{"type":"object"}}}}}}"#;

struct Both {
    served: Arc<Served>,
    catalog: Catalog,
    stop: CancellationToken,
}
impl Drop for Both {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn start() -> Both {
    let (world, _) = machine::world();
    let served = Served::new(world.clone());
    assert_eq!(served.put_lines(ITEMS).unwrap(), 400);
    served.put(TOOL).unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = format!("http://{}/", listener.local_addr().unwrap());
    let stop = CancellationToken::new();
    let serving = serve(machine::TcpListener(listener), world.clone(), served.router(), stop.clone());
    world.spawn.spawn(Box::pin(serving));
    let client = Client::new(world, Tls::Plain, Destination::Operator, Limits::default());
    Both { served, catalog: Catalog::new(client, &base).unwrap(), stop }
}

async fn all(catalog: &Catalog, mut query: SearchQuery) -> Vec<Listing> {
    let mut out = Vec::new();
    loop {
        let page = catalog.search(&query).await.unwrap();
        assert!(page.skipped.is_empty() && page.dropped == 0 && page.limit <= 50, "{:?}", page.skipped);
        out.extend(page.items);
        match page.cursor {
            Some(cursor) => query.cursor = Some(cursor),
            None => return out,
        }
    }
}

#[tokio::test]
async fn the_whole_catalog_is_read_page_by_page_byte_for_byte() {
    let both = start().await;
    let listings = all(&both.catalog, SearchQuery { limit: Some(200), ..Default::default() }).await;
    let read: BTreeSet<&str> = listings.iter().map(|listing| listing.raw.get()).collect();
    let served: BTreeSet<&str> = ITEMS.lines().chain([TOOL]).collect();
    assert_eq!(listings.len(), 401);
    assert_eq!(read, served);
}

#[tokio::test]
async fn filters_narrow_and_search_finds() {
    let both = start().await;
    let testnet = SearchQuery { network: Some("stellar:testnet".parse().unwrap()), ..Default::default() };
    let some = all(&both.catalog, testnet.clone()).await;
    assert!(some.len() > 100 && some.len() < 401, "{}", some.len());
    assert!(some.iter().all(|l| l.offers.iter().any(|o| o.network.as_str() == "stellar:testnet")));
    let mcp = SearchQuery { kind: Some(Kind::Mcp), ..testnet };
    assert_eq!(all(&both.catalog, mcp).await.len(), 1);
    let found = all(&both.catalog, SearchQuery { query: Some("zürich".into()), ..Default::default() }).await;
    assert_eq!(found[0].raw.get(), TOOL);
    let upto = SearchQuery { query: Some("data".into()), scheme: Some("upto".into()), ..Default::default() };
    assert!(all(&both.catalog, upto).await.iter().all(|l| l.offers.iter().any(|o| o.scheme == "upto")));
}

#[tokio::test]
async fn every_entry_resolves_to_itself() {
    let both = start().await;
    let listings = all(&both.catalog, SearchQuery { limit: Some(50), ..Default::default() }).await;
    for listing in listings.iter().step_by(7).chain(listings.iter().filter(|l| l.reference.url.contains('?'))) {
        let reference: ResourceRef = listing.reference.to_string().parse().unwrap();
        let resolved = both.catalog.resolve(&reference).await.unwrap();
        assert_eq!(resolved.raw.get(), listing.raw.get());
        assert_eq!(resolved.version_hash, listing.version_hash);
    }
}

#[tokio::test]
async fn a_changed_price_changes_the_version_and_a_removed_entry_is_not_listed() {
    let both = start().await;
    let reference = ResourceRef::new(Kind::Mcp, "https://seller.example/mcp", Some("zürich weather")).unwrap();
    let before = both.catalog.resolve(&reference).await.unwrap();
    both.served.put(&TOOL.replace("\"lastUpdated\":1", "\"lastUpdated\":2")).unwrap();
    assert_eq!(both.catalog.resolve(&reference).await.unwrap().version_hash, before.version_hash);
    both.served.put(&TOOL.replace("\"10000\"", "\"10001\"")).unwrap();
    assert_ne!(both.catalog.resolve(&reference).await.unwrap().version_hash, before.version_hash);
    assert!(both.served.remove("https://seller.example/mcp", Some("zürich weather")));
    assert!(matches!(both.catalog.resolve(&reference).await, Err(CatalogError::NotListed)));
}

#[tokio::test]
async fn a_cursor_from_before_a_change_is_refused_as_the_agents_argument() {
    let both = start().await;
    let first = both.catalog.search(&SearchQuery::default()).await.unwrap();
    both.served.put(&TOOL.replace("\"10000\"", "\"10001\"")).unwrap();
    let next = SearchQuery { cursor: first.cursor, ..Default::default() };
    let got = both.catalog.search(&next).await;
    assert!(matches!(got, Err(CatalogError::Invalid { field: "cursor", .. })), "{got:?}");
}
