//! What must be true at the end of every case.

use std::collections::BTreeMap;

use tollway::ledger::State;

use super::answer::Answer;
use super::case::{Story, Tally, rows};
use super::plan::Case;
use super::stage::{PER_DAY, PRICE, Stage};

pub async fn audit(case: &Case, stage: &Stage, story: &Story) -> Result<Tally, String> {
    let rows = rows(stage).await?;
    let transfers = stage.network.transfers();
    let mut unmatched: BTreeMap<String, _> = BTreeMap::new();
    for transfer in &transfers {
        let nonce = transfer.nonce.ok_or("a transfer without an authorization")?.to_string();
        if unmatched.insert(nonce, transfer).is_some() {
            return Err("one nonce moved money twice".into());
        }
    }
    let mut moved = BTreeMap::new();
    for row in &rows {
        let id = row.payment_id.to_hex();
        let transfer = unmatched.remove(&row.authorization.nonce);
        match (row.state, transfer) {
            (State::Settled, Some(transfer)) => {
                let right = transfer.payer == row.payer
                    && transfer.pay_to == row.pay_to
                    && row.settled.and_then(|amount| amount.to_i128()) == Some(transfer.amount)
                    && row.transaction.as_ref().is_none_or(|hash| hash.eq_ignore_ascii_case(&transfer.transaction));
                if !right {
                    return Err(format!("the row is not its transfer: {row:?} {transfer:?}"));
                }
                moved.insert(id, transfer.transaction.to_lowercase());
            }
            (State::Settled, None) => return Err(format!("settled without a transfer: {row:?}")),
            (state, Some(_)) => return Err(format!("{} although the money moved: {row:?}", state.as_str())),
            (State::Released, None) if row.reason.is_some() => {}
            (State::Released, None) => return Err(format!("released without a reason: {row:?}")),
            (state, None) => return Err(format!("{} at the end: {row:?}", state.as_str())),
        }
    }
    if !unmatched.is_empty() {
        return Err(format!("money moved without a row: {unmatched:?}"));
    }
    for row in &rows {
        let (_, events) = stage
            .ledger
            .show(&row.payment_id.to_hex())
            .await
            .map_err(|e| e.to_string())?
            .ok_or("a listed row cannot be shown")?;
        for event in events {
            if matches!(event.event.as_str(), "in_doubt" | "released") && event.reason.is_none() {
                return Err(format!("a hold without a reason: {event:?}"));
            }
        }
    }
    let found = stage.ledger.audit().await.map_err(|e| e.to_string())?;
    if !found.differences.is_empty() || found.payments != rows.len() as u64 {
        return Err(format!("counters and rows differ: {found:?}"));
    }
    let spent: i128 = transfers.iter().map(|transfer| transfer.amount).sum();
    if spent > i128::from(PER_DAY) || transfers.iter().any(|transfer| transfer.amount != i128::from(PRICE)) {
        return Err(format!("a cap was crossed: {spent}"));
    }
    if stage.signer.signatures() > rows.len() as u64 {
        return Err(format!("{} signatures for {} rows", stage.signer.signatures(), rows.len()));
    }
    // With a key there is one purchase whatever happens; without one each call after an answer may be another.
    let most = if case.keyed { 1 } else { 1 + story.after_success };
    if transfers.len() > most {
        return Err(format!("{} transfers for {most} purchases", transfers.len()));
    }
    for (what, answer) in &story.heard {
        truthful(answer, &moved, transfers.len()).map_err(|problem| format!("{what}: {problem}"))?;
    }
    Ok(Tally { rows: rows.len(), transfers: transfers.len() })
}

/// What the agent was told agrees with what the chain shows in the end.
fn truthful(answer: &Answer, moved: &BTreeMap<String, String>, transfers: usize) -> Result<(), String> {
    let label = answer.label();
    if answer.is_paid() {
        let id = answer.payment().ok_or("a receipt without its payment")?;
        let transaction = moved.get(id).ok_or("a receipt for money that did not move")?;
        if answer.transaction().is_some_and(|said| !said.eq_ignore_ascii_case(transaction)) {
            return Err(format!("the receipt names another transaction: {:?}", answer.transaction()));
        }
        return Ok(());
    }
    if label.starts_with("SETTLEMENT_UNKNOWN") && (answer.moved() != Some("unknown") || answer.payment().is_none()) {
        return Err(format!("{label} without its payment, or with moved {:?}", answer.moved()));
    }
    if answer.moved() == Some("no") {
        match answer.payment() {
            Some(id) if moved.contains_key(id) => return Err(format!("{label} says no, and the money moved")),
            _ => {}
        }
    }
    let _ = transfers;
    Ok(())
}
