//! What a node answers, as JSON.

use serde_json::{Value, json};
use stellar_xdr::{
    ConfigSettingEntry, ConfigSettingId, LedgerEntryData, LedgerKey, LedgerKeyConfigSetting, OperationBody, ReadXdr,
    ScSymbol, ScVal, SorobanAuthorizationEntry, SorobanCredentials, SorobanTransactionData, TransactionEnvelope,
    TransactionExt, TransactionResult, TransactionResultResult, WriteXdr,
};

use super::*;
use crate::sandbox::chain::tests::{AMOUNT, Arm, START, Scene, envelope as signed_envelope, options, scene, sign};
use crate::sandbox::chain::{Options, PASSPHRASE, USDC, lock};

struct Rpc {
    scene: Scene,
    server: Server,
}

fn rpc(options: Options) -> Rpc {
    let scene = scene(options);
    let server =
        Server { chain: scene.chain().clone(), node: Node::default(), world: crate::ports::machine::world().0 };
    Rpc { scene, server }
}

impl Rpc {
    fn ask(&self, method: &str, params: Value) -> Value {
        let asked = json!({"jsonrpc": "2.0", "id": 7, "method": method, "params": params});
        let answer = self.server.answer(asked.to_string().as_bytes());
        assert_eq!((&answer["jsonrpc"], &answer["id"]), (&json!("2.0"), &json!(7)));
        answer
    }

    fn get(&self, method: &str, params: Value) -> Value {
        let answer = self.ask(method, params);
        assert!(answer.get("error").is_none(), "{answer}");
        answer["result"].clone()
    }

    fn code(&self, method: &str, params: Value) -> Value {
        self.ask(method, params)["error"]["code"].clone()
    }

    /// The same network, seen `lag` ledgers behind.
    fn behind(&self, lag: u32) -> Server {
        Server { node: Node::lagging(lag), ..self.server.clone() }
    }

    /// A payment ready to be sent.
    fn payment(&self, nonce: i64) -> TransactionEnvelope {
        let entry = self.scene.signed(AMOUNT, nonce, 100);
        let data = self.scene.data(&entry).unwrap();
        signed_envelope(self.scene.transaction(&entry, &data), &self.scene.fees)
    }

    fn send(&self, envelope: &TransactionEnvelope) -> Value {
        self.get("sendTransaction", json!({"transaction": b64(envelope)}))
    }
}

fn b64(value: &impl WriteXdr) -> String {
    value.to_xdr_base64(LIMITS).unwrap()
}

fn nonce_key(scene: &Scene, nonce: i64) -> String {
    b64(&LedgerKey::ContractData(stellar_xdr::LedgerKeyContractData {
        contract: crate::sandbox::chain::tests::address(&scene.payer),
        key: ScVal::LedgerKeyNonce(stellar_xdr::ScNonceKey { nonce }),
        durability: stellar_xdr::ContractDataDurability::Temporary,
    }))
}

#[tokio::test]
async fn only_a_strict_call_is_answered() {
    let rpc = rpc(options());
    for (body, code) in [
        ("", -32_700),
        ("{", -32_700),
        (r#"{"jsonrpc":"2.0","id":1,"id":2,"method":"getHealth"}"#, -32_700),
        (r#"[{"jsonrpc":"2.0","id":1,"method":"getHealth"}]"#, -32_600),
        (r#"{"jsonrpc":"1.0","id":1,"method":"getHealth"}"#, -32_600),
        (r#"{"id":1,"method":"getHealth"}"#, -32_600),
        (r#"{"jsonrpc":"2.0","method":"getHealth"}"#, -32_600),
        (r#"{"jsonrpc":"2.0","id":null,"method":"getHealth"}"#, -32_600),
        (r#"{"jsonrpc":"2.0","id":{},"method":"getHealth"}"#, -32_600),
        (r#"{"jsonrpc":"2.0","id":1,"method":"getHealth","more":1}"#, -32_600),
        (r#"{"jsonrpc":"2.0","id":1,"method":"getLedgers","params":{}}"#, -32_601),
        (r#"{"jsonrpc":"2.0","id":1,"method":"GetHealth"}"#, -32_601),
        (r#"{"jsonrpc":"2.0","id":1,"method":"getHealth","params":[]}"#, -32_602),
        (r#"{"jsonrpc":"2.0","id":1,"method":"getTransaction"}"#, -32_602),
    ] {
        assert_eq!(rpc.server.answer(body.as_bytes())["error"]["code"], json!(code), "{body}");
    }
    let text = rpc.server.answer(br#"{"jsonrpc":"2.0","id":"a","method":"getHealth"}"#);
    assert_eq!((&text["id"], &text["result"]["status"]), (&json!("a"), &json!("healthy")));
}

#[tokio::test]
async fn parameters_that_mean_nothing_are_refused() {
    let rpc = rpc(options());
    let payment = b64(&rpc.payment(1));
    for (method, params) in [
        ("getTransaction", json!({"hash": "00"})),
        ("getTransaction", json!({"hash": "g".repeat(64)})),
        ("getTransaction", json!({"hash": "0".repeat(64), "xdrFormat": "json"})),
        ("sendTransaction", json!({"transaction": "AAAA"})),
        ("sendTransaction", json!({"transaction": 1})),
        ("simulateTransaction", json!({"transaction": ""})),
        ("simulateTransaction", json!({"transaction": payment, "authMode": "trust"})),
        ("simulateTransaction", json!({"transaction": payment, "authMode": "record"})),
        ("getLedgerEntries", json!({"keys": ["AAAA"]})),
        ("getLedgerEntries", json!({"keys": vec![""; 201]})),
        ("getLedgerEntries", json!({})),
    ] {
        assert_eq!(rpc.code(method, params.clone()), json!(-32_602), "{method} {params}");
    }
}

#[tokio::test]
async fn a_sent_transaction_is_found_when_its_ledger_is_closed() {
    let rpc = rpc(options());
    let payment = rpc.payment(5);
    let sent = rpc.send(&payment);
    assert_eq!(sent["status"], json!("PENDING"));
    let hash = sent["hash"].clone();
    let find = || rpc.get("getTransaction", json!({"hash": hash}));
    assert_eq!(find()["status"], json!("NOT_FOUND"));
    assert_eq!(rpc.send(&payment)["status"], json!("DUPLICATE"));
    let closed = rpc.scene.network.close_now();
    let found = find();
    assert_eq!(found["status"], json!("SUCCESS"));
    assert_eq!(found["ledger"], json!(closed.sequence));
    assert_eq!(found["createdAt"], json!(closed.closed_at.to_string()));
    assert_eq!((&found["applicationOrder"], &found["feeBump"]), (&json!(1), &json!(false)));
    assert_eq!(found["envelopeXdr"], json!(b64(&payment)));
    let result = TransactionResult::from_xdr_base64(found["resultXdr"].as_str().unwrap(), LIMITS).unwrap();
    assert!(matches!(result.result, TransactionResultResult::TxSuccess(_)));
    assert_eq!(found["events"]["contractEventsXdr"][0].as_array().unwrap().len(), 1);
    assert_eq!(rpc.send(&payment)["status"], json!("DUPLICATE"));

    // The same authorization in another transaction: in a ledger, and failed.
    let TransactionEnvelope::Tx(inner) = &payment else { panic!() };
    let mut again = inner.tx.clone();
    again.seq_num.0 += 1;
    let sent = rpc.send(&signed_envelope(again, &rpc.scene.fees));
    rpc.scene.close(1);
    let found = rpc.get("getTransaction", json!({"hash": sent["hash"]}));
    assert_eq!(found["status"], json!("FAILED"));
    assert!(!found["diagnosticEventsXdr"].as_array().unwrap().is_empty());
    assert_eq!(rpc.scene.balances(), (START - AMOUNT, AMOUNT));
}

#[tokio::test]
async fn a_refused_transaction_says_why_and_a_full_queue_says_later() {
    let rpc = rpc(Options { queue: 0, ..options() });
    assert_eq!(rpc.send(&rpc.payment(5))["status"], json!("TRY_AGAIN_LATER"));
    let rpc = self::rpc(options());
    let TransactionEnvelope::Tx(inner) = rpc.payment(5) else { panic!() };
    let mut late = inner.tx;
    late.seq_num.0 += 7;
    let sent = rpc.send(&signed_envelope(late, &rpc.scene.fees));
    assert_eq!(sent["status"], json!("ERROR"));
    let result = TransactionResult::from_xdr_base64(sent["errorResultXdr"].as_str().unwrap(), LIMITS).unwrap();
    assert_eq!(result.result, TransactionResultResult::TxBadSeq);
}

#[tokio::test]
async fn a_recording_simulation_gives_an_entry_to_sign_and_an_enforcing_one_checks_it() {
    let rpc = rpc(options());
    let scene = &rpc.scene;
    let honest = scene.signed(AMOUNT, 5, 50);
    let data = scene.data(&honest).unwrap();
    let tx = |auth: Vec<SorobanAuthorizationEntry>| {
        let mut tx = scene.transaction(&honest, &data);
        let mut operation = tx.operations[0].clone();
        if let OperationBody::InvokeHostFunction(invoke) = &mut operation.body {
            invoke.auth = auth.try_into().unwrap();
        }
        tx.operations = vec![operation].try_into().unwrap();
        tx.ext = TransactionExt::V0;
        json!({"transaction": b64(&signed_envelope(tx, &scene.fees))})
    };
    for v2 in [false, true] {
        rpc.server.node.set_records_address_v2(v2);
        let recorded = rpc.get("simulateTransaction", tx(vec![]));
        let entry = recorded["results"][0]["auth"][0].as_str().unwrap();
        let mut entry = SorobanAuthorizationEntry::from_xdr_base64(entry, LIMITS).unwrap();
        match &mut entry.credentials {
            SorobanCredentials::Address(c) if !v2 => c.signature_expiration_ledger = 1_050,
            SorobanCredentials::AddressV2(c) if v2 => c.signature_expiration_ledger = 1_050,
            other => panic!("{other:?}"),
        }
        let unsigned = rpc.get("simulateTransaction", tx(vec![entry.clone()]));
        assert!(unsigned["error"].as_str().unwrap().contains("Auth"), "{unsigned}");
        assert!(unsigned.get("transactionData").is_none());
        let entry = sign(entry, &scene.payer, PASSPHRASE);
        let enforced = rpc.get("simulateTransaction", tx(vec![entry.clone()]));
        assert_eq!(enforced["results"][0]["auth"], json!([b64(&entry)]));
        let fee = |answer: &Value| answer["minResourceFee"].as_str().unwrap().parse::<i64>().unwrap();
        assert!(fee(&enforced) < fee(&recorded), "a recording reserves the nonce for long");
        let data = enforced["transactionData"].as_str().unwrap();
        let data = SorobanTransactionData::from_xdr_base64(data, LIMITS).unwrap();
        assert_eq!(data.resource_fee, fee(&enforced));
        assert_eq!(enforced["latestLedger"], json!(scene.network.latest().sequence));
        let kinds: Vec<&str> = enforced["stateChanges"]
            .as_array()
            .unwrap()
            .iter()
            .map(|change| change["type"].as_str().unwrap())
            .collect();
        assert_eq!(kinds.iter().filter(|kind| **kind == "created").count(), 1, "the nonce: {kinds:?}");
        assert!(scene.settle(signed_envelope(scene.transaction(&entry, &data), &scene.fees)).success);
    }
    let expiration = scene.network.latest().sequence + 50;
    let v2 = sign(scene.entry(AMOUNT, 9, expiration, Arm::AddressV2), &scene.payer, PASSPHRASE);
    assert!(rpc.get("simulateTransaction", tx(vec![v2]))["error"].is_null());
}

#[tokio::test]
async fn entries_are_shown_with_their_life_and_absent_ones_left_out() {
    let rpc = rpc(Options { min_temporary_ttl: 20, ..options() });
    let keys = |nonce| json!({"keys": [nonce_key(&rpc.scene, nonce)]});
    assert_eq!(rpc.get("getLedgerEntries", keys(5))["entries"], json!([]));
    assert!(rpc.scene.pay(AMOUNT, 5).success);
    let used = rpc.scene.network.latest().sequence;
    let shown = rpc.get("getLedgerEntries", keys(5));
    assert_eq!(shown["latestLedger"], json!(used));
    assert_eq!(shown["entries"][0]["key"], keys(5)["keys"][0]);
    assert_eq!(shown["entries"][0]["lastModifiedLedgerSeq"], json!(used));
    assert_eq!(shown["entries"][0]["liveUntilLedgerSeq"], json!(used + 99));

    let setting =
        LedgerKey::ConfigSetting(LedgerKeyConfigSetting { config_setting_id: ConfigSettingId::StateArchival });
    let shown = rpc.get("getLedgerEntries", json!({"keys": [b64(&setting), nonce_key(&rpc.scene, 6)]}));
    assert_eq!(shown["entries"].as_array().unwrap().len(), 1);
    let data = LedgerEntryData::from_xdr_base64(shown["entries"][0]["xdr"].as_str().unwrap(), LIMITS).unwrap();
    let LedgerEntryData::ConfigSetting(ConfigSettingEntry::StateArchival(settings)) = data else { panic!() };
    assert_eq!(settings.min_temporary_ttl, 20);

    let mine = crate::sandbox::chain::key_of(&LedgerEntryData::Account(
        lock(&rpc.server.chain).account(&rpc.scene.payer.id()).unwrap().clone(),
    ));
    assert_eq!(
        rpc.get("getLedgerEntries", json!({"keys": [b64(&mine.unwrap())]}))["entries"][0].get("liveUntilLedgerSeq"),
        None
    );
}

#[tokio::test]
async fn a_lagging_node_sees_the_past_as_it_was() {
    let rpc = rpc(options());
    let behind = rpc.behind(3);
    let ask = |method: &str, params: Value| {
        let asked = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
        behind.answer(asked.to_string().as_bytes())["result"].clone()
    };
    rpc.scene.close(5);
    let payment = rpc.payment(5);
    let sent = ask("sendTransaction", json!({"transaction": b64(&payment)}));
    assert_eq!(sent["status"], json!("PENDING"), "it hands on what it is sent");
    let hash = json!({"hash": sent["hash"]});
    let key = json!({"keys": [nonce_key(&rpc.scene, 5)]});
    let paid = rpc.scene.network.close_now().sequence;
    assert_eq!(rpc.get("getTransaction", hash.clone())["status"], json!("SUCCESS"));
    let again = json!({"transaction": b64(&payment)});
    for behind_by in (1..=3).rev() {
        assert_eq!(ask("getLatestLedger", json!({}))["sequence"], json!(paid - behind_by));
        assert_eq!(ask("getTransaction", hash.clone())["status"], json!("NOT_FOUND"));
        assert_eq!(ask("getLedgerEntries", key.clone())["entries"], json!([]));
        // It does not know that the nonce is used.
        assert!(ask("simulateTransaction", again.clone()).get("error").is_none());
        rpc.scene.close(1);
    }
    assert_eq!(ask("getLatestLedger", json!({}))["sequence"], json!(paid));
    assert_eq!(ask("getTransaction", hash)["status"], json!("SUCCESS"));
    assert_eq!(ask("getLedgerEntries", key)["entries"][0]["lastModifiedLedgerSeq"], json!(paid));
    assert!(ask("simulateTransaction", again)["error"].as_str().unwrap().contains("ExistingValue"));
}

#[tokio::test]
async fn what_is_not_retained_is_not_found_and_events_out_of_range_are_refused() {
    let rpc = rpc(Options { retention: 4, ..options() });
    let paid = rpc.scene.pay(AMOUNT, 5);
    let ledger = rpc.scene.network.latest().sequence;
    let find = || rpc.get("getTransaction", json!({"hash": hex::encode(paid.hash)}));
    rpc.scene.close(3);
    assert_eq!((&find()["status"], &find()["oldestLedger"]), (&json!("SUCCESS"), &json!(ledger)));
    assert_eq!(rpc.get("getEvents", json!({"startLedger": ledger}))["events"].as_array().unwrap().len(), 1);
    rpc.scene.close(1);
    assert_eq!((&find()["status"], &find()["oldestLedger"]), (&json!("NOT_FOUND"), &json!(ledger + 1)));
    let health = rpc.get("getHealth", json!({}));
    assert_eq!(health["oldestLedger"], json!(ledger + 1));
    assert_eq!((&health["latestLedger"], &health["ledgerRetentionWindow"]), (&json!(ledger + 4), &json!(4)));
    let refused = rpc.ask("getEvents", json!({"startLedger": ledger}));
    assert_eq!(refused["error"]["code"], json!(-32_600));
    assert!(refused["error"]["message"].as_str().unwrap().contains(&format!("{} - {}", ledger + 1, ledger + 4)));
    assert_eq!(rpc.code("getEvents", json!({"startLedger": ledger + 5})), json!(-32_600));
    // The nonce entry is state, not history.
    let key = json!({"keys": [nonce_key(&rpc.scene, 5)]});
    assert_eq!(rpc.get("getLedgerEntries", key)["entries"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn events_are_filtered_and_paged_without_loss() {
    let rpc = rpc(options());
    let mut paid = Vec::new();
    for nonce in 0..5 {
        paid.push(hex::encode(rpc.scene.pay(AMOUNT + nonce, nonce).hash));
        rpc.scene.close(1);
    }
    let start = 1_001;
    let hashes = |answer: &Value| -> Vec<String> {
        answer["events"].as_array().unwrap().iter().map(|e| e["txHash"].as_str().unwrap().to_owned()).collect()
    };
    let symbol = |name: &str| b64(&ScVal::Symbol(ScSymbol(name.try_into().unwrap())));
    let from = b64(&ScVal::Address(crate::sandbox::chain::tests::address(&rpc.scene.payer)));
    let to = b64(&ScVal::Address(crate::sandbox::chain::tests::address(&rpc.scene.shop)));
    let transfer = symbol("transfer");
    for (filter, all) in [
        (json!([]), true),
        (json!([{"type": "contract", "contractIds": [USDC], "topics": [[transfer, from, to, "**"]]}]), true),
        (json!([{"topics": [[transfer, from, to, "*"]]}]), true),
        (json!([{"topics": [["**"]]}]), true),
        (json!([{"topics": [[transfer, from, to]]}]), false),
        (json!([{"topics": [[transfer, to, from, "**"]]}]), false),
        (json!([{"topics": [[symbol("mint"), "**"]]}]), false),
        (json!([{"topics": [[symbol("mint"), "**"], [transfer, "**"]]}]), true),
        (json!([{"contractIds": ["CDLZFC3SYJYDZT7K67VZ75HPJVIEUVNIXF47ZG2FB2RMQQVU2HHGCYSC"]}]), false),
    ] {
        let answer = rpc.get("getEvents", json!({"startLedger": start, "filters": filter}));
        assert_eq!(hashes(&answer), if all { paid.clone() } else { vec![] }, "{filter}");
    }
    // The end is exclusive.
    let third = rpc.get("getTransaction", json!({"hash": paid[2]}))["ledger"].as_u64().unwrap();
    let some = rpc.get("getEvents", json!({"startLedger": start, "endLedger": third}));
    assert_eq!(hashes(&some), paid[..2]);
    let some = rpc.get("getEvents", json!({"startLedger": start, "endLedger": third + 1}));
    assert_eq!(hashes(&some), paid[..3]);

    let mut seen = Vec::new();
    let mut page = rpc.get("getEvents", json!({"startLedger": start, "pagination": {"limit": 2}}));
    while !hashes(&page).is_empty() {
        seen.extend(hashes(&page));
        page = rpc.get("getEvents", json!({"pagination": {"limit": 2, "cursor": page["cursor"]}}));
    }
    assert_eq!(seen, paid);
    // A reader that waits at the end gets the next one, and nothing twice.
    paid.push(hex::encode(rpc.scene.pay(AMOUNT, 99).hash));
    let page = rpc.get("getEvents", json!({"pagination": {"cursor": page["cursor"]}}));
    assert_eq!(hashes(&page), paid[5..]);

    for wrong in [
        json!({}),
        json!({"startLedger": start, "pagination": {"cursor": page["cursor"]}}),
        json!({"pagination": {"cursor": "x"}}),
        json!({"startLedger": start, "endLedger": start}),
        json!({"startLedger": start, "pagination": {"limit": 0}}),
        json!({"startLedger": start, "pagination": {"limit": 10_001}}),
        json!({"startLedger": start, "filters": vec![json!({}); 6]}),
        json!({"startLedger": start, "filters": [{"type": "diagnostic"}]}),
        json!({"startLedger": start, "filters": [{"contractIds": ["C"]}]}),
        json!({"startLedger": start, "filters": [{"topics": [[]]}]}),
        json!({"startLedger": start, "filters": [{"topics": [["**", "*"]]}]}),
        json!({"startLedger": start, "filters": [{"topics": [["transfer"]]}]}),
    ] {
        assert_eq!(rpc.code("getEvents", wrong.clone()), json!(-32_602), "{wrong}");
    }
}

#[tokio::test]
async fn the_newest_ledger_comes_with_a_header_that_says_the_same() {
    let rpc = rpc(options());
    let latest = rpc.get("getLatestLedger", json!({}));
    let header = stellar_xdr::LedgerHeader::from_xdr_base64(latest["headerXdr"].as_str().unwrap(), LIMITS).unwrap();
    assert_eq!(latest["sequence"], json!(header.ledger_seq));
    assert_eq!(latest["closeTime"], json!(header.scp_value.close_time.0.to_string()));
    let meta = latest["metadataXdr"].as_str().unwrap();
    assert!(stellar_xdr::LedgerCloseMeta::from_xdr_base64(meta, LIMITS).is_ok());
    assert_eq!(latest["protocolVersion"], rpc.get("getNetwork", json!({}))["protocolVersion"]);
    assert_eq!(rpc.get("getNetwork", json!({}))["passphrase"], json!(PASSPHRASE));
    assert_eq!(rpc.get("getFeeStats", json!({}))["sorobanInclusionFee"]["p99"], json!("100"));
}
