//! Sellers that have the signed payment and want another.

use serde_json::{Value, json};

use super::scene::{Behaviour, Change, Scene, Shop};
use crate::pay::bench::{NETWORK, challenge, output, result, rpc_error, with_receipt};
use crate::pay::server::{Reply, Request};

fn receipt(transaction: &str) -> Value {
    json!({"success": true, "transaction": transaction, "network": NETWORK})
}

fn paid_output(receipt: &Value) -> Reply {
    result(&with_receipt(output(), receipt))
}

/// After the settlement, with its hash.
fn settled(shop: &Shop, request: &Request, then: impl Fn(&str) -> Reply) -> Reply {
    match shop.settle(request) {
        Ok(hash) => then(&hash),
        // The identical bytes again: the money has moved already.
        Err(_) => then(&shop.settled.lock().unwrap().last().unwrap().clone()),
    }
}

fn asks_again(shop: &Shop, change: impl Fn(&mut Value)) -> Reply {
    let mut offer = shop.local.requirements();
    change(&mut offer);
    result(&challenge("https://seller.example/mcp", &offer))
}

fn events(messages: &[Value]) -> Reply {
    let body = messages.iter().map(|message| format!("event: message\ndata: {message}\n\n")).collect();
    Reply::Http(200, "content-type: text/event-stream\r\n".into(), body)
}

fn message(result: &Value) -> Value {
    json!({"jsonrpc": "2.0", "id": "$id", "result": result})
}

/// (the case, what the seller does, the row's end, transfers)
type Case = (&'static str, Behaviour, &'static str, usize);

const CASES: [Case; 30] = [
    ("silent", |_, _, _| Reply::Cut, "released", 0),
    ("silent-after-settling", |s, r, _| settled(s, r, |_| Reply::Cut), "settled", 1),
    (
        "settles-when-asked-again",
        |s, r, n| if n == 0 { Reply::Cut } else { settled(s, r, |h| paid_output(&receipt(h))) },
        "settled",
        1,
    ),
    (
        "says-no-after-settling",
        |s, r, _| {
            settled(s, r, |h| {
                paid_output(&json!({"success": false, "errorReason": "no", "transaction": h, "network": NETWORK}))
            })
        },
        "settled",
        1,
    ),
    (
        "pending-for-ever",
        |_, _, _| {
            paid_output(
                &json!({"success": false, "errorReason": "settlement_pending", "transaction": "ab".repeat(32), "network": NETWORK}),
            )
        },
        "released",
        0,
    ),
    ("no-receipt", |_, _, _| result(&output()), "released", 0),
    ("no-receipt-after-settling", |s, r, _| settled(s, r, |_| result(&output())), "settled", 1),
    (
        "other-network",
        |_, _, _| paid_output(&json!({"success": true, "transaction": "ab".repeat(32), "network": "stellar:pubnet"})),
        "released",
        0,
    ),
    (
        "other-payer",
        |s, _, _| {
            let thief = s.local.thief.address();
            paid_output(&json!({"success": true, "transaction": "ab".repeat(32), "network": NETWORK, "payer": thief}))
        },
        "released",
        0,
    ),
    (
        "more-than-signed",
        |s, r, _| {
            settled(s, r, |h| {
                paid_output(&json!({"success": true, "transaction": h, "network": NETWORK, "amount": "20000"}))
            })
        },
        "settled",
        1,
    ),
    (
        "less-than-signed",
        |s, r, _| {
            settled(s, r, |h| {
                paid_output(&json!({"success": true, "transaction": h, "network": NETWORK, "amount": "1"}))
            })
        },
        "settled",
        1,
    ),
    ("no-hash", |_, _, _| paid_output(&receipt("")), "released", 0),
    ("hash-of-another-payment", |s, _, _| paid_output(&receipt(&s.settled.lock().unwrap()[0].clone())), "released", 0),
    (
        "hash-of-another-payment-in-capitals",
        |s, _, _| paid_output(&receipt(&s.settled.lock().unwrap()[0].to_uppercase())),
        "released",
        0,
    ),
    (
        "receipt-of-a-mistyped-success",
        |_, _, _| paid_output(&json!({"success": "true", "transaction": "ab".repeat(32), "network": NETWORK})),
        "released",
        0,
    ),
    ("asks-again", |s, _, _| asks_again(s, |_| ()), "released", 0),
    ("asks-again-after-settling", |s, r, _| settled(s, r, |_| asks_again(s, |_| ())), "settled", 1),
    ("asks-for-more", |s, _, _| asks_again(s, |offer| offer["amount"] = json!("20000")), "released", 0),
    (
        "asks-for-another",
        |s, _, _| {
            let thief = s.local.thief.address();
            asks_again(s, |offer| offer["payTo"] = json!(thief))
        },
        "released",
        0,
    ),
    ("asks-in-an-error", |_, _, _| rpc_error(402, "pay again"), "released", 0),
    ("asks-with-a-status", |_, _, _| Reply::status(402, "{}"), "released", 0),
    (
        "two-answers",
        |s, r, _| settled(s, r, |h| events(&[message(&output()), message(&with_receipt(output(), &receipt(h)))])),
        "settled",
        1,
    ),
    (
        "two-answers-second-challenges",
        |s, r, _| {
            settled(s, r, |h| {
                let again = challenge("https://seller.example/mcp", &s.local.requirements());
                events(&[message(&with_receipt(output(), &receipt(h))), message(&again)])
            })
        },
        "settled",
        1,
    ),
    (
        "another-answer-each-time",
        |s, r, n| match n {
            0 => result(&output()),
            _ => settled(s, r, |h| {
                result(&with_receipt(json!({"content": [{"type": "text", "text": "rain"}]}), &receipt(h)))
            }),
        },
        "settled",
        1,
    ),
    (
        "questions-for-ever",
        |_, _, n| {
            result(&json!({"resultType": "input_required", "inputRequests": {}, "requestState": format!("s{n}")}))
        },
        "released",
        0,
    ),
    (
        "redirects",
        |_, _, _| Reply::Http(307, "location: http://127.0.0.1:9/steal\r\n".into(), String::new()),
        "released",
        0,
    ),
    (
        "encoded",
        |_, _, _| Reply::Http(200, "content-type: application/json\r\ncontent-encoding: gzip\r\n".into(), "x".into()),
        "released",
        0,
    ),
    (
        "switches",
        |_, _, _| Reply::Http(101, "upgrade: x\r\nconnection: upgrade\r\n".into(), String::new()),
        "released",
        0,
    ),
    (
        "deep",
        |_, _, _| {
            Reply::json(format!(r#"{{"jsonrpc":"2.0","id":"$id","result":{}{}}}"#, "[".repeat(5000), "]".repeat(5000)))
        },
        "released",
        0,
    ),
    (
        "member-twice",
        |s, r, _| {
            settled(s, r, |h| {
                let text = with_receipt(output(), &receipt(h)).to_string();
                Reply::json(format!(
                    r#"{{"jsonrpc":"2.0","id":"$id","result":{{"isError":false,"isError":true,{}}}"#,
                    &text[1..]
                ))
            })
        },
        "settled",
        1,
    ),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
pub async fn whatever_a_seller_does_with_the_payment_it_gets_no_more_than_that() {
    let honest: Behaviour = |s, r, _| settled(s, r, |h| paid_output(&receipt(h)));
    let hostile = CASES.iter().map(|(name, behaviour, ..)| (*name, *behaviour));
    let behaviours = std::iter::once(("honest", honest)).chain(hostile).collect();
    let scene = Scene::new(Change { behaviours, ..Change::default() }).await;
    let first = scene.call("honest").await;
    assert_eq!(first["receipt"]["status"], "settled", "{first}");

    for (name, ..) in CASES {
        let answer = scene.call(name).await;
        let moved = &answer["details"]["moneyMayHaveMoved"];
        assert!(
            answer["receipt"]["status"] == "settled" || answer["receipt"].is_null() || *moved == "unknown",
            "{name}: {answer}"
        );
        assert_ne!(*moved, json!("no"), "{name}: {answer}");
        // Again under the same key: never another signature.
        scene.call(name).await;
        scene.call(name).await;
    }
    assert_eq!(scene.signed().len(), CASES.len() + 1, "one signature for each call");
    scene.signed_nothing_but_our_transfers(10).await;
    for (case, sent) in scene.shop.paid.lock().unwrap().iter() {
        assert!(sent.len() <= 3 && sent.iter().all(|params| payment(params) == payment(&sent[0])), "{case}");
    }
    scene.finish().await;
    let ends = scene.ends().await;
    let mut wrong = Vec::new();
    for (name, _, state, transfers) in CASES {
        let (found, reason, moved) = ends.get(name).unwrap_or_else(|| panic!("{name} has no row: {ends:?}"));
        if (found.as_str(), *moved) != (state, transfers) {
            wrong.push(format!("{name}: {found} {reason}, {moved} transfers; not {state}, {transfers}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(scene.local.network.balance(&scene.local.thief.id()), Some(0));
}

/// The signed payment in raw `params`.
fn payment(params: &str) -> String {
    let params: Value = serde_json::from_str(params).unwrap();
    params["_meta"]["x402/payment"].to_string()
}

/// A real transfer of somebody else's, from the chain, is a receipt like any other: there is nothing in it that the
/// buyer could see. The seller that shows it has given away its output, and can still take what was signed, once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
pub async fn another_buyers_receipt_costs_the_one_authorized_payment_at_most() {
    let replays: Behaviour = |shop, request, _| {
        let hash = shop.anothers.lock().unwrap().clone();
        if shop.settled.lock().unwrap().is_empty() {
            // Shown first, settled afterwards as well.
            shop.settle(request).unwrap();
        }
        paid_output(&receipt(&hash))
    };
    let scene = Scene::new(Change { behaviours: [("replays", replays)].into(), ..Change::default() }).await;
    *scene.shop.anothers.lock().unwrap() = "cd".repeat(32);
    let answer = scene.call("replays").await;
    assert_eq!(answer["receipt"]["settledAmount"], "10000", "{answer}");
    assert_eq!(scene.call("replays").await["receipt"], answer["receipt"]);
    assert_eq!(scene.signed().len(), 1);
    scene.finish().await;
    assert_eq!(scene.ends().await["replays"].2, 1);
}
