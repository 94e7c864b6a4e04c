//! A smart account (`C…`) that pays, on the real host: a contract of its own decides what is a signature.

use ed25519_dalek::{Signer as _, SigningKey};
use stellar_xdr::{
    ContractId, HashIdPreimage, Limits, ReadXdr, ScBytes, ScVal, SorobanAddressCredentials, SorobanAuthorizationEntry,
    SorobanCredentials, WriteXdr,
};
use tollway::chain::NonceReading;
use tollway::chain::stellar::{Balance, Credentials, Draft, NonceQuestion, PrepareError, SignedEntry, Stellar};
use tollway::money::Amount;
use tollway::sandbox::chain::{LocalNetwork, Node, USDC};

use crate::stellar::{Local, local};

const XDR: Limits = Limits { depth: 100, len: 64 * 1024 };

/// A smart account on a network, with the key that its contract asks for.
pub struct SmartAccount {
    pub id: ContractId,
    pub key: SigningKey,
}

impl SmartAccount {
    pub fn install(network: &LocalNetwork, usdc: i64) -> SmartAccount {
        let key = SigningKey::from_bytes(&[41; 32]);
        let escaped: String = key.verifying_key().to_bytes().iter().map(|byte| format!("\\{byte:02x}")).collect();
        let text = include_str!("account.wat").replace("PUBLIC_KEY", &escaped);
        let id = network.install_contract(&wat::parse_str(text).unwrap()).unwrap();
        network.endow(&id, usdc).unwrap();
        SmartAccount { id, key }
    }

    /// `C…`
    pub fn address(&self) -> String {
        self.id.to_string()
    }

    /// What a signer answers for this account: the whole entry, base64. `alter` makes it a wrong one.
    pub fn answer(&self, preimage: &str, alter: impl FnOnce(&mut [u8; 64])) -> String {
        let bytes = HashIdPreimage::from_xdr_base64(preimage, XDR).unwrap();
        let mut signature = self.key.sign(&sha256(&bytes.to_xdr(XDR).unwrap())).to_bytes();
        alter(&mut signature);
        let credentials = |nonce, signature_expiration_ledger| SorobanAddressCredentials {
            address: self.address().parse().unwrap(),
            nonce,
            signature_expiration_ledger,
            signature: ScVal::Bytes(ScBytes(signature.to_vec().try_into().unwrap())),
        };
        let entry = match bytes {
            HashIdPreimage::SorobanAuthorization(p) => SorobanAuthorizationEntry {
                credentials: SorobanCredentials::Address(credentials(p.nonce, p.signature_expiration_ledger)),
                root_invocation: p.invocation,
            },
            HashIdPreimage::SorobanAuthorizationWithAddress(p) => SorobanAuthorizationEntry {
                credentials: SorobanCredentials::AddressV2(credentials(p.nonce, p.signature_expiration_ledger)),
                root_invocation: p.invocation,
            },
            other => panic!("{other:?}"),
        };
        entry.to_xdr_base64(XDR).unwrap()
    }

    fn sign(&self, draft: Draft) -> SignedEntry {
        let answer = self.answer(&draft.preimage_base64(), |_| {});
        draft.attach_base64(&answer).unwrap()
    }
}

fn sha256(bytes: &[u8]) -> [u8; 32] {
    use sha2::Digest as _;
    sha2::Sha256::digest(bytes).into()
}

fn draft(local: &Local, stellar: &Stellar, payer: &SmartAccount) -> Draft {
    stellar.draft(&local.offer(), &payer.address(), local.here()).unwrap()
}

async fn read(stellar: &Stellar, draft: &Draft, reserved_at: u32) -> NonceReading {
    let transfer = draft.transfer();
    let question = NonceQuestion {
        payer: &transfer.payer,
        pay_to: &transfer.pay_to,
        asset: &transfer.asset,
        nonce: draft.nonce(),
        amount: None,
        expiration: draft.expiration(),
        reserved_at,
        reserved_ms: 0,
    };
    stellar.nonce_reading(question).await
}

async fn balance(stellar: &Stellar, payer: &SmartAccount) -> Balance {
    stellar.balance_fresh(&payer.address(), &USDC.parse().unwrap()).await.unwrap()
}

#[tokio::test]
async fn a_smart_account_pays_once_and_the_chain_remembers_its_nonce() {
    for credentials in [Credentials::Address, Credentials::AddressV2] {
        let local = local();
        let payer = SmartAccount::install(&local.network, 30_000);
        let mut settings = local.settings(vec![local.node(Node::default()).await]);
        settings.credentials = credentials;
        let stellar = local.with(settings);
        assert_eq!(balance(&stellar, &payer).await, Balance::Of(Amount::from_u64(30_000)));
        let start = local.here().sequence;
        let (ours, other) = (draft(&local, &stellar, &payer), draft(&local, &stellar, &payer));
        assert_eq!(read(&stellar, &ours, start).await, NonceReading::Open);

        let transaction = stellar.prepare(&payer.sign(ours.clone())).await.unwrap();
        let settled = local.settle(&transaction).await;
        assert_eq!(settled["success"], true, "{credentials:?}: {settled}");
        assert_eq!(settled["payer"], payer.address());
        assert_eq!(local.network.balance(&local.seller.id()), Some(10_000));
        assert_eq!(balance(&stellar, &payer).await, Balance::Of(Amount::from_u64(20_000)));
        assert_eq!(local.settle(&transaction).await["success"], false, "the nonce is used");
        assert_eq!(local.network.balance(&local.seller.id()), Some(10_000));

        let transfers = local.network.transfers();
        let [transfer] = transfers.as_slice() else { panic!("{transfers:?}") };
        assert_eq!((&transfer.payer, transfer.nonce), (&payer.address(), Some(ours.nonce())));
        let used = NonceReading::Used { ledger: transfer.ledger.into() };
        assert_eq!(read(&stellar, &ours, start).await, used, "by its entry");
        // Beyond the entry's minimum life of 20 ledgers, by the history; the same transfer that never ran is told apart.
        while local.here().sequence < transfer.ledger + 45 {
            local.network.close_now();
        }
        assert_eq!(read(&stellar, &ours, start).await, used, "by the history");
        assert_eq!(read(&stellar, &other, start).await, NonceReading::Dead);
    }
}

#[tokio::test]
async fn only_the_simulation_proves_a_smart_accounts_signature_and_it_does() {
    let local = local();
    let stellar = local.honest().await;
    let payer = SmartAccount::install(&local.network, 30_000);
    let poor = SmartAccount::install(&local.network, 0);
    assert_eq!(balance(&stellar, &poor).await, Balance::Of(Amount::ZERO), "a contract needs no trustline");

    let wrong = draft(&local, &stellar, &payer);
    let answer = payer.answer(&wrong.preimage_base64(), |signature| signature[0] ^= 1);
    let wrong = wrong.attach_base64(&answer).unwrap();
    let moved = draft(&local, &stellar, &payer);
    // A right signature of the same account, over another payment.
    let other = payer.answer(&draft(&local, &stellar, &payer).preimage_base64(), |_| {});
    let other = SorobanAuthorizationEntry::from_xdr_base64(other, XDR).unwrap();
    let mut entry =
        SorobanAuthorizationEntry::from_xdr_base64(payer.answer(&moved.preimage_base64(), |_| {}), XDR).unwrap();
    let signature_of = |entry: &SorobanAuthorizationEntry| match &entry.credentials {
        SorobanCredentials::Address(c) => c.signature.clone(),
        other => panic!("{other:?}"),
    };
    let SorobanCredentials::Address(credentials) = &mut entry.credentials else { panic!("the Address arm") };
    credentials.signature = signature_of(&other);
    let moved = moved.attach_base64(&entry.to_xdr_base64(XDR).unwrap()).unwrap();
    let nobody = SmartAccount { id: ContractId(stellar_xdr::Hash([9; 32])), key: payer.key.clone() };
    let undeployed = nobody.sign(draft(&local, &stellar, &nobody));
    let unfunded = poor.sign(draft(&local, &stellar, &poor));
    for (what, signed) in [
        ("a wrong signature", wrong),
        ("a signature over another payment", moved),
        ("no contract", undeployed),
        ("no money", unfunded),
    ] {
        match stellar.prepare(&signed).await {
            Err(PrepareError::Failed(why)) => assert!(!why.is_empty(), "{what}"),
            other => panic!("{what}: {other:?}"),
        }
    }
    assert!(local.network.transfers().is_empty());
}
