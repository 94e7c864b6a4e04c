//! The catalog over HTTP (`x402.md` 3.2): search, browse, resolve. The catalog is named by the operator; what it
//! passes on from sellers is not trusted.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use url::Url;

use super::answer::{Answer, Pagination, error_word};
use super::query::{MAX_LIMIT, Position, Verdict};
use super::{CatalogError, Listing, ResourceRef, SearchQuery, Skip, warnings};
use crate::http::{Client, HttpError};
use crate::telemetry;
use crate::x402::words;

/// One page of results.
#[derive(Debug, Clone)]
pub struct Page {
    pub items: Vec<Listing>,
    /// One entry per item that could not be understood.
    pub skipped: Vec<Skip>,
    /// Items that are well formed and do not match the filters.
    pub dropped: usize,
    /// The catalog says that the results are incomplete, or it sent more than was asked for.
    pub partial_results: bool,
    /// What the catalog took.
    pub limit: u32,
    pub cursor: Option<String>,
}

/// A client for one catalog; cheap to clone.
#[derive(Clone)]
pub struct Catalog {
    client: Client,
    /// Without a slash at its end.
    base: Arc<str>,
    memory: Arc<Mutex<Memory>>,
}

/// Caches only: losing them costs time.
struct Memory {
    /// Until when the catalog is taken to have no `/discovery/resource`.
    no_lookup_until: Option<Instant>,
    /// The most that each endpoint took without refusing.
    list_limit: u32,
    search_limit: u32,
    /// Who was paid when an option was first seen.
    recipients: BTreeMap<OptionKey, Vec<String>>,
}

/// Reference, network, scheme, asset.
type OptionKey = (String, String, String, String);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Path {
    List,
    Search,
    Lookup,
}

/// What is done with items beyond the limit that was asked for (hazard BAZ-08).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Take {
    /// Left out: the agent gets what it asked for.
    AsAsked,
    /// Looked at as well: somebody is looking for one entry.
    All,
}

/// A page before it is made ready for the agent.
pub(super) struct Fetched {
    pub(super) page: Page,
    pub(super) next: Option<Position>,
}

const LOOKUP_AGAIN_AFTER: Duration = Duration::from_secs(600);
const MAX_RECIPIENTS: usize = 20_000;
/// Limits that catalogs are known to take, tried downwards after a 400.
const KNOWN_LIMITS: [u32; 3] = [100, 50, 20];
/// A catalog without lookup: so many pages of search, then of the list; together no longer than this.
const SEARCH_PAGES: usize = 2;
const BROWSE_PAGES: usize = 20;
const BROWSE_LIMIT: u32 = 100;
const RESOLVE_TIME: Duration = Duration::from_secs(30);

impl Catalog {
    /// `base_url` may have a path and a trailing slash. The client's limits bound every request.
    pub fn new(client: Client, base_url: &str) -> Result<Catalog, CatalogError> {
        let invalid = || CatalogError::Invalid {
            field: "facilitator.base_url",
            detail: "is not an http or https URL without credentials, query and fragment".to_owned(),
        };
        let url = Url::parse(base_url).map_err(|_| invalid())?;
        let plain = matches!(url.scheme(), "http" | "https")
            && url.host_str().is_some()
            && url.username().is_empty()
            && url.password().is_none()
            && url.query().is_none()
            && url.fragment().is_none();
        if !plain {
            return Err(invalid());
        }
        let memory = Memory {
            no_lookup_until: None,
            list_limit: MAX_LIMIT,
            search_limit: MAX_LIMIT,
            recipients: BTreeMap::new(),
        };
        let base = url.as_str().trim_end_matches('/').into();
        Ok(Catalog { client, base, memory: Arc::new(Mutex::new(memory)) })
    }

    pub async fn search(&self, query: &SearchQuery) -> Result<Page, CatalogError> {
        let at = query.position()?;
        let limit = query.limit();
        let Fetched { mut page, next } = counted(self.fetch(query, &at, limit, Take::AsAsked).await)?;
        page.cursor = next.map(|next| query.cursor(&next));
        for listing in &mut page.items {
            self.watch_recipients(listing);
        }
        Ok(page)
    }

    /// The active entry of exactly this reference. Asks the catalog's lookup where it has one, else looks through
    /// search and list. [`CatalogError::NotListed`] only where the catalog said so or was read to its end.
    pub async fn resolve(&self, reference: &ResourceRef) -> Result<Listing, CatalogError> {
        let found = tokio::time::timeout(RESOLVE_TIME, self.find(reference)).await;
        let mut listing = counted(found.unwrap_or(Err(CatalogError::Timeout)))?;
        self.watch_recipients(&mut listing);
        Ok(listing)
    }

    async fn find(&self, reference: &ResourceRef) -> Result<Listing, CatalogError> {
        let now = Instant::now();
        if self.memory().no_lookup_until.is_none_or(|until| now >= until)
            && let Some(listing) = self.lookup(reference).await?
        {
            return Ok(listing);
        }
        let text = match &reference.tool_name {
            Some(name) => name.clone(),
            None => reference.url.trim_end_matches('/').rsplit('/').next().unwrap_or_default().to_owned(),
        };
        let kind = Some(reference.kind);
        let searched = SearchQuery { query: Some(text.chars().take(400).collect()), kind, ..SearchQuery::default() };
        match self.look_through(&searched, SEARCH_PAGES, reference).await {
            Ok((Some(listing), _)) => return Ok(listing),
            // Catalogs of the first specification have no search.
            Ok((None, _)) | Err(CatalogError::Protocol(_)) => {}
            Err(e) => return Err(e),
        }
        let all = SearchQuery { kind, ..SearchQuery::default() };
        match self.look_through(&all, BROWSE_PAGES, reference).await? {
            (Some(listing), _) => Ok(listing),
            (None, true) => Err(CatalogError::NotListed),
            (None, false) => Err(CatalogError::Protocol("it has no lookup, and is too long to be read".to_owned())),
        }
    }

    /// `None` where the catalog has no such endpoint, or its answer decides nothing.
    async fn lookup(&self, reference: &ResourceRef) -> Result<Option<Listing>, CatalogError> {
        let mut parameters = vec![("type", reference.kind.as_str().to_owned()), ("url", reference.url.clone())];
        parameters.extend(reference.tool_name.clone().map(|name| ("toolName", name)));
        let (status, body) = self.get(Path::Lookup, &parameters).await?;
        match status {
            200 => {
                let answer = Answer::parse(&body)?;
                let item = answer.get("resource").filter(|raw| raw.get().starts_with('{'));
                let item = item.ok_or_else(|| CatalogError::Protocol("it has no resource".to_owned()))?;
                let listing = match Listing::parse(item) {
                    Ok(listing) => listing,
                    Err(Skip("inactive")) => return Err(CatalogError::NotListed),
                    Err(Skip(reason)) => {
                        return Err(CatalogError::Protocol(format!("the entry is unusable: {reason}")));
                    }
                };
                // Catalogs normalise the URL (openx402 drops its query) and may so find a neighbour.
                Ok(Some(listing).filter(|listing| listing.reference == *reference))
            }
            404 if error_word(&body).as_deref() == Some("not_found") => Err(CatalogError::NotListed),
            404 | 405 | 501 => {
                self.memory().no_lookup_until = Some(Instant::now() + LOOKUP_AGAIN_AFTER);
                Ok(None)
            }
            400 | 422 => Ok(None),
            _ => Err(refused(status, &body)),
        }
    }

    /// The entry, and whether everything that the query gives was read.
    async fn look_through(
        &self,
        query: &SearchQuery,
        pages: usize,
        reference: &ResourceRef,
    ) -> Result<(Option<Listing>, bool), CatalogError> {
        let mut at = Position::Offset(0);
        for _ in 0..pages {
            let Fetched { page, next } = self.fetch(query, &at, BROWSE_LIMIT, Take::All).await?;
            if let Some(listing) = page.items.into_iter().find(|listing| listing.reference == *reference) {
                return Ok((Some(listing), true));
            }
            match next {
                Some(next) => at = next,
                None => return Ok((None, !page.partial_results)),
            }
        }
        Ok((None, false))
    }

    /// One page, asked for with `limit` or what the catalog takes of it.
    async fn fetch(&self, query: &SearchQuery, at: &Position, limit: u32, take: Take) -> Result<Fetched, CatalogError> {
        let path = if query.text().is_some() { Path::Search } else { Path::List };
        let mut limit = limit.min(self.known_limit(path));
        let body = loop {
            let (status, body) = self.get(path, &query.parameters(at, limit)).await?;
            if status == 200 {
                break body;
            }
            let word = error_word(&body).unwrap_or_default();
            if word.contains("cursor") {
                let detail = "the catalog does not take it any more".to_owned();
                return Err(CatalogError::Invalid { field: "cursor", detail });
            }
            let about_something_else = word.contains("query") || word.contains("mode");
            match KNOWN_LIMITS.into_iter().find(|known| *known < limit) {
                Some(lower) if matches!(status, 400 | 422) && !about_something_else => limit = lower,
                _ => return Err(refused(status, &body)),
            }
        };
        // Remembered only once it worked: the refusal may have been about something else.
        self.remember_limit(path, limit);
        read_page(query, at, path, limit, take, &body)
    }

    async fn get(&self, path: Path, parameters: &[(&'static str, String)]) -> Result<(u16, Bytes), CatalogError> {
        let path = match path {
            Path::List => "/discovery/resources",
            Path::Search => "/discovery/search",
            Path::Lookup => "/discovery/resource",
        };
        let unusable = || CatalogError::Protocol("the request cannot be written".to_owned());
        let mut url = Url::parse(&format!("{}{path}", self.base)).map_err(|_| unusable())?;
        url.query_pairs_mut().extend_pairs(parameters);
        let request = http::Request::get(url.as_str())
            .header(http::header::ACCEPT, "application/json")
            .body(Bytes::new())
            .map_err(|_| unusable())?;
        match self.client.send(request).await {
            Ok(answer) => Ok((answer.status().as_u16(), answer.into_body())),
            Err(e) if e.is_timeout() => Err(CatalogError::Timeout),
            Err(e @ HttpError::TooLarge(_)) => Err(CatalogError::Protocol(e.to_string())),
            Err(e) => Err(CatalogError::Protocol(words(&e.to_string(), 200))),
        }
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn known_limit(&self, path: Path) -> u32 {
        let memory = self.memory();
        if path == Path::Search { memory.search_limit } else { memory.list_limit }
    }

    /// Lowers what is known when a lower limit was needed.
    fn remember_limit(&self, path: Path, worked: u32) {
        let mut memory = self.memory();
        let known = if path == Path::Search { &mut memory.search_limit } else { &mut memory.list_limit };
        if worked < *known && KNOWN_LIMITS.contains(&worked) {
            *known = worked;
        }
    }

    /// Hazard BAZ-06: a recipient that moves while the entry stays is worth a word.
    fn watch_recipients(&self, listing: &mut Listing) {
        let mut seen: BTreeMap<OptionKey, Vec<String>> = BTreeMap::new();
        for offer in &listing.offers {
            let asset = offer.asset.as_str().to_ascii_lowercase();
            let key = (listing.reference.to_string(), offer.network.to_string(), offer.scheme.clone(), asset);
            seen.entry(key).or_default().push(match offer.network.namespace() {
                "eip155" => offer.pay_to.to_ascii_lowercase(),
                _ => offer.pay_to.clone(),
            });
        }
        let mut memory = self.memory();
        let mut moved = false;
        for (key, recipients) in seen {
            match memory.recipients.get(&key) {
                Some(first) => moved |= recipients.iter().any(|recipient| !first.contains(recipient)),
                None if memory.recipients.len() < MAX_RECIPIENTS => {
                    memory.recipients.insert(key, recipients);
                }
                None => {}
            }
        }
        drop(memory);
        if moved {
            listing.warn(warnings::RECIPIENT_CHANGED);
        }
    }
}

fn refused(status: u16, body: &[u8]) -> CatalogError {
    match (status, error_word(body)) {
        (408 | 504, _) => CatalogError::Timeout,
        (300..=399, _) => CatalogError::Protocol(format!("it redirects (status {status}), which is not followed")),
        (_, Some(word)) => CatalogError::Protocol(format!("status {status}, {word}")),
        (_, None) => CatalogError::Protocol(format!("status {status}")),
    }
}

pub(super) fn read_page(
    query: &SearchQuery,
    at: &Position,
    path: Path,
    limit: u32,
    take: Take,
    body: &[u8],
) -> Result<Fetched, CatalogError> {
    let answer = Answer::parse(body)?;
    let raw = answer.items()?;
    let pagination = answer.pagination();
    let taken = match take {
        Take::AsAsked => raw.len().min(limit as usize),
        Take::All => raw.len(),
    };
    let mut page = Page {
        items: Vec::with_capacity(taken),
        skipped: Vec::new(),
        dropped: 0,
        partial_results: answer.flag("partialResults") || taken < raw.len(),
        limit: pagination.limit.map_or(limit, |taken| taken.min(limit)),
        cursor: None,
    };
    let mut ignored = answer.names_unapplied_filters();
    for item in raw.iter().take(taken) {
        match Listing::parse(item) {
            Err(skip) => page.skipped.push(skip),
            Ok(listing) => match query.judge(&listing) {
                Verdict::Matches => page.items.push(listing),
                verdict => {
                    ignored |= verdict == Verdict::FilterIgnored;
                    page.dropped += 1;
                }
            },
        }
    }
    if ignored {
        page.items.iter_mut().for_each(|listing| listing.warn(warnings::FILTER_NOT_APPLIED));
    }
    mark_ambiguous(&mut page.items);
    let next = next(at, path, page.limit, taken, &pagination);
    Ok(Fetched { page, next })
}

/// Catalog keys can collide, above all under `mcp://` names (`x402.md` 9.9).
fn mark_ambiguous(items: &mut [Listing]) {
    let mut versions: BTreeMap<ResourceRef, Vec<String>> = BTreeMap::new();
    for listing in items.iter() {
        let seen = versions.entry(listing.reference.clone()).or_default();
        if !seen.contains(&listing.version_hash) {
            seen.push(listing.version_hash.clone());
        }
    }
    for listing in items.iter_mut() {
        if versions.get(&listing.reference).is_some_and(|seen| seen.len() > 1) {
            listing.warn(warnings::AMBIGUOUS_REFERENCE);
        }
    }
}

/// The catalog's cursor where it gives one; else the next offset, if the catalog pages by offset and has more.
fn next(at: &Position, path: Path, limit: u32, taken: usize, pagination: &Pagination) -> Option<Position> {
    if let Some(cursor) = &pagination.cursor {
        // The same cursor again would be the same page for ever.
        return match at {
            Position::Cursor(sent) if sent == cursor => None,
            _ => Some(Position::Cursor(cursor.clone())),
        };
    }
    let Position::Offset(offset) = at else { return None };
    if taken == 0 || pagination.offset.is_some_and(|echoed| echoed != *offset) {
        return None;
    }
    let next = offset.checked_add(u64::try_from(taken).ok()?)?;
    let more = match pagination.total {
        Some(total) => next < total,
        None => path == Path::List && taken >= limit as usize,
    };
    more.then_some(Position::Offset(next))
}

fn counted<T>(answer: Result<T, CatalogError>) -> Result<T, CatalogError> {
    let result = match &answer {
        Ok(_) => "ok",
        Err(CatalogError::NotListed) => "not_listed",
        Err(CatalogError::Timeout) => "timeout",
        // Nobody was asked.
        Err(CatalogError::Invalid { .. }) => return answer,
        Err(CatalogError::Protocol(_)) => "unusable",
    };
    telemetry::CATALOG_CALLS.one([result]);
    answer
}
