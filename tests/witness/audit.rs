//! No transfer without a row, no settled row without a transfer.

use std::collections::BTreeSet;
use std::path::PathBuf;

use tollway::ledger::{Filter, Ledger as _, SqliteLedger};
use tollway::ports::World;
use tollway::sandbox::chain::{NETWORK, USDC};
use tollway::sandbox::start::Running;

/// (nonce, transaction, payer, recipient, amount) of one payment.
type Line = (String, String, String, String, i128);

/// Reads these ledgers of the sandbox's directory: each transfer that the chain has seen is one settled row in one of
/// them, with the same nonce, transaction, accounts and amount, and no settled row is without its transfer. No row is
/// open, and the ledgers' own audits find no difference. Gives the number of payments.
pub async fn every_transfer_has_its_row(sandbox: &Running, world: &World, ledgers: &[&str]) -> usize {
    let mut settled = Vec::new();
    for name in ledgers {
        let path: PathBuf = sandbox.dir().join(name);
        assert!(path.exists(), "{}", path.display());
        let ledger = SqliteLedger::open(&path, world.clone(), None).await.unwrap();
        let rows = ledger.list(&Filter { limit: 10_000, ..Filter::default() }).await.unwrap();
        let audit = ledger.audit().await.unwrap();
        assert_eq!(audit.differences, [], "{name}");
        assert_eq!(audit.payments, rows.len() as u64, "{name}");
        for row in rows {
            assert!(!row.state.is_open(), "{name}: {row:?}");
            let Some(amount) = row.settled else { continue };
            assert_eq!((row.network.as_str(), row.asset.as_str()), (NETWORK, USDC));
            let transaction = row.transaction.clone().unwrap_or_else(|| panic!("{name}: {row:?}"));
            let amount = amount.to_i128().unwrap();
            settled.push((row.authorization.nonce, transaction.to_lowercase(), row.payer, row.pay_to, amount));
        }
    }
    let moved = sandbox.backends.network.transfers().into_iter().map(|transfer| {
        let nonce = transfer.nonce.unwrap_or_else(|| panic!("a transfer without an authorization: {transfer:?}"));
        (nonce.to_string(), transfer.transaction, transfer.payer, transfer.pay_to, transfer.amount)
    });
    let moved: Vec<Line> = moved.collect();
    let set = |lines: &[Line]| lines.iter().cloned().collect::<BTreeSet<_>>();
    assert_eq!(set(&settled), set(&moved));
    assert_eq!((settled.len(), set(&settled).len()), (moved.len(), moved.len()), "a payment twice");
    moved.len()
}
