//! What is on offer now: the prices, those of them that somebody can settle, and what was said of a tool in earlier
//! challenges.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use serde_json::value::RawValue;

use super::payment::CallKey;
use super::prices::{Book, Item, Prices};
use crate::json;
use crate::money::Network;
use crate::x402::Offer;

/// Schemes by network, as its facilitator said; a network that is missing was not heard of, and counts as settled.
pub(super) type Support = BTreeMap<Network, BTreeSet<String>>;

/// One moment's view. A request keeps the one that it began with.
pub(super) struct Stock {
    pub book: Book,
    /// The same items with the offers that can be settled; an item may have none.
    pub shown: Prices,
    support: Support,
}

pub(super) struct Shelf(RwLock<Arc<Stock>>);

impl Shelf {
    pub fn new(prices: Prices) -> Shelf {
        let stock = Stock::new(Book::new(prices), Support::new());
        Shelf(RwLock::new(Arc::new(stock)))
    }

    pub fn now(&self) -> Arc<Stock> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn reprice(&self, prices: Prices, now_ms: u64) {
        self.change(|stock| {
            let mut book = stock.book.clone();
            book.replace(prices, now_ms);
            Stock::new(book, stock.support.clone())
        });
    }

    /// What some facilitators said; the others are as before. The offers that are not advertised, as they are logged.
    pub fn supported(&self, heard: Support) -> BTreeSet<String> {
        self.change(|stock| {
            let mut support = stock.support.clone();
            support.extend(heard);
            Stock::new(stock.book.clone(), support)
        });
        let stock = self.now();
        let all = stock.book.prices().items().flat_map(|item| item.offers.iter().map(|priced| (item.scope(), priced)));
        let gone = all.filter(|(_, priced)| !is_settled(&stock.support, &priced.offer));
        gone.map(|(scope, priced)| format!("{scope} on {}", priced.offer.network)).collect()
    }

    fn change(&self, change: impl FnOnce(&Stock) -> Stock) {
        let mut stock = self.0.write().unwrap_or_else(PoisonError::into_inner);
        *stock = Arc::new(change(&stock));
    }
}

impl Stock {
    fn new(book: Book, support: Support) -> Stock {
        let shown = book.prices().showing(|offer| is_settled(&support, offer));
        Stock { book, shown, support }
    }
}

fn is_settled(support: &Support, offer: &Offer) -> bool {
    support.get(&offer.network).is_none_or(|schemes| schemes.contains(&offer.scheme))
}

/// The declarations of one tool that may still be echoed, newest first. Replicas have each their own: a payer whose
/// challenge came from one that had heard of a change earlier is asked again, and nothing was charged.
#[derive(Default)]
pub(super) struct Declared(Mutex<BTreeMap<String, VecDeque<Box<RawValue>>>>);

/// Of one tool: as many as its sessions see different ones, or as it changed.
const REMEMBERED: usize = 4;
/// A larger declaration is not made, bytes.
const MAX_DECLARATION: usize = 32 * 1024;

impl Declared {
    /// `tool`: the key of a priced tool, so there are no more than prices.
    pub fn remember(&self, tool: &str, declaration: Box<RawValue>) {
        if declaration.get().len() > MAX_DECLARATION {
            return;
        }
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let of = all.entry(tool.to_owned()).or_default();
        if of.front().is_some_and(|newest| newest.get() == declaration.get()) {
            return;
        }
        of.retain(|other| other.get() != declaration.get());
        of.push_front(declaration);
        of.truncate(REMEMBERED);
    }

    pub fn of(&self, tool: &str) -> Vec<Box<RawValue>> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(tool).map(|of| of.iter().cloned().collect()).unwrap_or_default()
    }
}

/// What hooks asked for, by the call that they asked it for: good for the offer's own timeout.
#[derive(Default)]
pub(super) struct Quotes(Mutex<BTreeMap<[u8; 32], Vec<Quote>>>);

struct Quote {
    scope: String,
    offer: Offer,
    until_ms: u64,
}

const MAX_QUOTED: usize = 10_000;

impl Quotes {
    pub fn remember(&self, call: &CallKey, item: &Item, now_ms: u64) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= MAX_QUOTED && !all.contains_key(&call.call) {
            all.retain(|_, quotes| quotes.iter().any(|quote| quote.until_ms > now_ms));
            if all.len() >= MAX_QUOTED {
                all.pop_first();
            }
        }
        let quotes = all.entry(call.call).or_default();
        quotes.retain(|quote| quote.until_ms > now_ms);
        for priced in &item.offers {
            let (scope, offer) = (item.scope(), priced.offer.clone());
            quotes.retain(|quote| !(quote.scope == scope && json::equal(&quote.offer.raw, &offer.raw)));
            let until_ms = now_ms.saturating_add(offer.max_timeout_seconds.saturating_mul(1_000));
            quotes.push(Quote { scope, offer, until_ms });
        }
        // A hook that never says the same twice.
        let over = quotes.len().saturating_sub(16);
        quotes.drain(..over);
    }

    /// The offer, of now or quoted before, that `accepted` equals in every member.
    pub fn matching(&self, call: &CallKey, item: &Item, accepted: &RawValue, now_ms: u64) -> Option<Offer> {
        let equal = |offer: &&Offer| json::equal(&offer.raw, accepted);
        if let Some(now) = item.offers.iter().map(|priced| &priced.offer).find(equal) {
            return Some(now.clone());
        }
        let (all, scope) = (self.0.lock().unwrap_or_else(PoisonError::into_inner), item.scope());
        let quoted = all.get(&call.call).into_iter().flatten();
        let mut good = quoted.filter(|quote| quote.scope == scope && quote.until_ms > now_ms).map(|quote| &quote.offer);
        good.find(equal).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Kind;
    use super::super::prices::Unlisted;
    use super::super::prices::tests::{item, prices};
    use super::*;

    #[test]
    fn an_offer_that_nobody_settles_is_not_shown_and_may_still_be_paid() {
        let shelf = Shelf::new(prices(vec![item(Kind::Tool, "search", 1)], Unlisted::Free));
        let network: Network = "stellar:testnet".parse().unwrap();
        let offers = |shelf: &Shelf| shelf.now().shown.items().map(|item| item.offers.len()).sum::<usize>();
        assert_eq!(offers(&shelf), 1, "nobody was asked yet");
        let gone = shelf.supported(BTreeMap::from([(network.clone(), BTreeSet::from(["upto".to_owned()]))]));
        assert_eq!((offers(&shelf), gone.len()), (0, 1));
        assert!(shelf.supported(Support::new()).len() == 1, "who did not answer has not changed its mind");
        shelf.reprice(prices(vec![item(Kind::Tool, "search", 2)], Unlisted::Free), 0);
        assert_eq!(offers(&shelf), 0, "new prices change nothing of that");
        let accepted = item(Kind::Tool, "search", 1).offers[0].offer.raw.clone();
        let stock = shelf.now();
        let item = stock.book.prices().items().next().unwrap();
        assert!(stock.book.matching(item, &accepted, 1).is_some());
        assert!(shelf.supported(BTreeMap::from([(network, BTreeSet::from(["exact".to_owned()]))])).is_empty());
        assert_eq!(offers(&shelf), 1);
    }

    #[test]
    fn a_few_declarations_of_a_tool_are_remembered() {
        let declared = Declared::default();
        for n in [1, 2, 1, 3, 4, 5] {
            declared.remember("search", crate::json::raw(&n));
        }
        let of: Vec<String> = declared.of("search").iter().map(|raw| raw.get().to_owned()).collect();
        assert_eq!(of, ["5", "4", "3", "1"]);
        declared.remember("search", crate::json::raw(&"x".repeat(MAX_DECLARATION)));
        assert_eq!(declared.of("search").len(), 4);
        assert!(declared.of("other").is_empty());
    }
}
