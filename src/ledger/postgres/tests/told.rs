//! Callers that pay on and on while something happens to the server, and what they were told held against the ledger.

use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::future::{join, join_all};

use super::*;
use crate::ledger::table::{CALL, amount};

/// A payment, whether it was said to be reserved, and whether it was said to be settled.
type Told = (PaymentId, bool, bool);

pub(super) fn call(lane: u8, round: u32) -> Intent {
    let mut intent = CALL.intent();
    let mut bytes = [lane; 32];
    bytes[..4].copy_from_slice(&round.to_be_bytes());
    intent.payment_id = PaymentId::from_bytes(bytes);
    intent.quote.call_hash = bytes;
    intent.authorization.nonce = format!("{lane}-{round}");
    intent
}

/// Four callers reserve and settle until `happens` is over; then whatever one of them was told must hold: what was said
/// to be reserved is, once, and the counters equal the rows.
pub(super) async fn what_was_told_holds<T>(ledger: &PostgresLedger, happens: impl Future<Output = T>) -> T {
    let stopped = AtomicBool::new(false);
    let until = async {
        let happened = happens.await;
        stopped.store(true, Ordering::SeqCst);
        happened
    };
    let (told, happened) = join(join_all((0..4).map(|lane| pays_on(ledger, lane, &stopped))), until).await;
    let told = told.concat();
    assert!(told.iter().filter(|(_, _, settled)| *settled).count() > 20, "{} calls", told.len());
    for (id, reserved, settled) in told {
        let row = ledger.show(&id.to_hex()).await.unwrap();
        let state = row.as_ref().map(|(payment, _)| payment.state);
        match (reserved, settled) {
            (true, true) => assert_eq!(state, Some(State::Settled)),
            (true, false) => assert!(state.is_some()),
            (false, _) => {}
        }
        if let Some((_, events)) = row {
            let twice = |event: &str| events.iter().filter(|e| e.event == event).count() > 1;
            assert!(!twice("reserved") && !twice("settled"), "{events:?}");
        }
    }
    assert_eq!(ledger.audit().await.unwrap().differences, []);
    happened
}

async fn pays_on(ledger: &PostgresLedger, lane: u8, stopped: &AtomicBool) -> Vec<Told> {
    let mut told = Vec::new();
    for round in 0u32.. {
        if stopped.load(Ordering::SeqCst) {
            break;
        }
        let intent = call(lane, round);
        let reserved = matches!(ledger.decide(&intent).await, Ok(Decision::Fresh(_)));
        let request = SettleRequest {
            payment_id: intent.payment_id,
            amount: amount("60"),
            transaction: None,
            evidence: Evidence::Receipt,
            outcome: Some(b"output"),
            unfinished: false,
        };
        let settled = reserved && matches!(ledger.settle(request).await, Ok(SettleOutcome::Settled));
        told.push((intent.payment_id, reserved, settled));
        if !reserved {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    told
}
