//! JWTs: every algorithm that is good, everything that is not, keys that change, and whose session it is.

use std::time::Duration;

use aws_lc_rs::hmac;
use aws_lc_rs::rsa::KeySize;
use http::{Method, StatusCode};
use serde_json::{Value, json};
use tollway::http::{Client, Destination, Limits, Tls};
use tollway::mcp::auth::{Jwt, Method as _, Verdict};
use tollway::ports::machine;

use super::issuer::{AUDIENCE, ISSUER, Issuer, Key, claims, encode, now};
use super::{ALICE, BOB, Front, parse, pass};
use crate::secrets;

const OK: StatusCode = StatusCode::OK;
const UNAUTHORIZED: StatusCode = StatusCode::UNAUTHORIZED;

#[tokio::test]
async fn a_token_of_each_algorithm_is_good_and_one_that_is_not_allowed_is_refused() {
    let logs = secrets::logs();
    let keys = [
        ("rs256", Key::rsa("RS256", KeySize::Rsa2048)),
        ("rs512", Key::rsa("RS512", KeySize::Rsa2048)),
        ("ps256", Key::rsa("PS256", KeySize::Rsa3072)),
        ("es256", Key::p256()),
        ("eddsa", Key::ed()),
    ];
    let published: Vec<(&str, &Key)> = keys.iter().map(|(id, key)| (*id, key)).collect();
    let issuer = Issuer::start(&published).await;
    let front = Front::start(issuer.section(json!({})), &[]).await;
    for (id, key) in &keys {
        let token = key.good(id, json!({}));
        // RS512 is not in the default list.
        let expected = if *id == "rs512" { UNAUTHORIZED } else { OK };
        assert_eq!(front.ask(Some(&token)).await.status, expected, "{id}");
        // Without a name all that fit are tried; with a wrong one none is.
        let header = json!({"alg": key.algorithm()});
        assert_eq!(front.ask(Some(&key.token(&header, &claims(json!({}))))).await.status, expected, "{id} unnamed");
        let signature = token.rsplit_once('.').unwrap().1;
        assert!(!logs.text().contains(&token[..60]) && !logs.text().contains(signature), "{id} is in the log");
    }
    assert_eq!(issuer.asked(), 1);
    let all = Front::start(issuer.section(json!({"algorithms": ["RS512"]})), &[]).await;
    assert_eq!(all.ask(Some(&keys[1].1.good("rs512", json!({})))).await.status, OK);
    assert_eq!(all.ask(Some(&keys[0].1.good("rs256", json!({})))).await.status, UNAUTHORIZED);
}

#[tokio::test]
async fn what_is_not_exactly_a_good_token_is_refused() {
    let (key, other) = (Key::ed(), Key::ed());
    let rsa = Key::rsa("RS256", KeySize::Rsa2048);
    let issuer = Issuer::start(&[("k", &key), ("r", &rsa)]).await;
    let front = Front::start(issuer.section(json!({})), &[]).await;
    let good = json!({"alg": "EdDSA", "kid": "k"});
    let header = |change: Value| {
        let mut header = good.clone();
        header.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        key.token(&header, &claims(json!({})))
    };
    let entry = json!({"network": "stellar:testnet", "asset": "CA", "day_max_atomic": "5"});

    for fine in [
        header(json!({})),
        header(json!({"typ": "jwt"})),
        header(json!({"typ": "at+JWT"})),
        header(json!({"typ": "application/at+jwt", "jku": "https://evil.example", "jwk": other.jwk("k")})),
        key.good("k", json!({"exp": now() - 10})),
        key.good("k", json!({"nbf": now() + 20, "iat": null})),
        key.good("k", json!({"aud": ["x", AUDIENCE]})),
        key.good("k", json!({"exp": now() as f64 + 100.5})),
        key.good("k", json!({"session": "s", "tollway_limits": [entry]})),
    ] {
        assert_eq!(front.ask(Some(&fine)).await.status, OK, "{fine}");
    }

    let token = header(json!({}));
    let (signed, signature) = token.rsplit_once('.').unwrap();
    let (head, body) = signed.split_once('.').unwrap();
    let hmac_of = |algorithm: &str, secret: &[u8]| {
        let signed = format!("{}.{body}", encode(json!({"alg": algorithm, "kid": "k"}).to_string()));
        let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret), signed.as_bytes());
        format!("{signed}.{}", encode(tag))
    };
    let unsigned = |algorithm: &str| format!("{}.{body}.", encode(json!({"alg": algorithm}).to_string()));
    let raised = encode(claims(json!({"sub": "mallory"})).to_string());
    let twice = format!(r#"{{"iss":"{ISSUER}","aud":"{AUDIENCE}","sub":"a","sub":"b","exp":{}}}"#, now() + 99);
    let twice = format!("{}.{}", encode(good.to_string()), encode(twice));

    let mut bad = vec![
        ("no signature", format!("{signed}.")),
        ("alg none", unsigned("none")),
        ("alg None", unsigned("None")),
        ("no alg", format!("{}.{body}.{signature}", encode("{}"))),
        ("a shared secret that is the public key", hmac_of("HS256", &key.public())),
        ("the same of the RSA key", hmac_of("HS256", &rsa.public())),
        ("an empty secret", hmac_of("HS256", b"")),
        ("another key's signature", other.token(&good, &claims(json!({})))),
        (
            "a key that the token brings",
            other.token(&json!({"alg": "EdDSA", "jwk": other.jwk("k")}), &claims(json!({}))),
        ),
        ("another key's name", header(json!({"kid": "r"}))),
        ("an unknown key", header(json!({"kid": "x"}))),
        ("a kid that is no string", header(json!({"kid": 1}))),
        ("an algorithm of another key", header(json!({"alg": "RS256"}))),
        ("what must be understood", header(json!({"crit": ["b64"], "b64": false}))),
        ("a DPoP proof", header(json!({"typ": "dpop+jwt"}))),
        ("a logout token", header(json!({"typ": "logout+jwt"}))),
        ("other claims under the signature", format!("{head}.{raised}.{signature}")),
        ("a claim twice", format!("{twice}.{}", encode(key.sign(twice.as_bytes())))),
        ("four parts", format!("{token}.x")),
        ("padding", format!("{token}=")),
    ];
    for change in [
        json!({"exp": now() - 40}),
        json!({"exp": null}),
        json!({"exp": "soon"}),
        json!({"exp": 1e300}),
        json!({"nbf": now() + 60}),
        json!({"nbf": "now"}),
        json!({"iat": now() + 3600}),
        json!({"iss": "https://issuer.example/"}),
        json!({"iss": null}),
        json!({"iss": [ISSUER]}),
        json!({"aud": "https://tollway.example"}),
        json!({"aud": null}),
        json!({"aud": []}),
        json!({"aud": [AUDIENCE, 1]}),
        json!({"aud": {"a": AUDIENCE}}),
        json!({"sub": null}),
        json!({"sub": ""}),
        json!({"sub": "*"}),
        json!({"sub": "total"}),
        json!({"sub": "two words"}),
        json!({"sub": "é"}),
        json!({"sub": "x".repeat(126)}),
        json!({"sub": 7}),
        json!({"session": 7}),
        json!({"session": ""}),
        json!({"session": "s".repeat(257)}),
        json!({"tollway_limits": null, "sub": "*"}),
        json!({"tollway_limits": {}}),
        json!({"tollway_limits": [{"network": "stellar:testnet", "asset": "CA", "day_max_atomic": "-5"}]}),
    ] {
        bad.push(("its claims", key.good("k", change)));
    }
    for (what, token) in &bad {
        // The failures of one address are counted; here they are meant.
        pass(Duration::from_secs(1)).await;
        let answer = front.ask(Some(token)).await;
        assert_eq!(answer.status, UNAUTHORIZED, "{what}: {token}");
        assert!(answer.header("www-authenticate").contains("error=\"invalid_token\""), "{what}: {answer:?}");
        assert!(!format!("{:?} {}", answer.headers, answer.body).contains(&token[..20]), "{what}: {answer:?}");
    }
    assert_eq!(front.ask(Some(&header(json!({})))).await.status, OK);
}

#[tokio::test]
async fn a_token_with_any_character_changed_is_refused() {
    let key = Key::p256();
    let issuer = Issuer::start(&[("k", &key)]).await;
    let (world, _) = machine::world();
    let config = parse(issuer.section(json!({})), &[]).unwrap();
    let client = Client::new(world.clone(), Tls::Plain, Destination::Operator, Limits::default());
    let jwt = Jwt::new(config.auth.jwt.unwrap(), client, world);
    let token = key.good("k", json!({}));
    assert!(matches!(jwt.identify(&token, true).await, Verdict::Known(_)));
    for at in 0..token.len() {
        for other in ["A", "_", ".", "="] {
            let changed = format!("{}{other}{}", &token[..at], &token[at + 1..]);
            if changed != token {
                let verdict = jwt.identify(&changed, true).await;
                assert!(matches!(verdict, Verdict::NotMine | Verdict::Refused(_)), "{at}: {verdict:?}");
            }
        }
        let verdict = jwt.identify(&token[..at], true).await;
        assert!(matches!(verdict, Verdict::NotMine | Verdict::Refused(_)), "cut at {at}: {verdict:?}");
    }
}

#[tokio::test]
async fn typ_can_be_demanded_and_a_short_key_signs_nothing() {
    let key = Key::ed();
    let short = Key::rsa("RS256", KeySize::Rsa2048);
    let issuer = Issuer::start(&[("k", &key)]).await;
    let front = Front::start(issuer.section(json!({"typ": "at+jwt"})), &[]).await;
    let with = |typ| key.token(&json!({"alg": "EdDSA", "kid": "k", "typ": typ}), &claims(json!({})));
    assert_eq!(front.ask(Some(&with("AT+JWT"))).await.status, OK);
    assert_eq!(front.ask(Some(&with("JWT"))).await.status, UNAUTHORIZED);
    let mut jwk = short.jwk("short");
    jwk["n"] = json!(encode([0xc5; 128]));
    issuer.answer(Some(&json!({"keys": [jwk, key.jwk("k")]}).to_string()));
    let front = Front::start(issuer.section(json!({})), &[]).await;
    assert_eq!(front.ask(Some(&short.good("short", json!({})))).await.status, UNAUTHORIZED);
}

#[tokio::test]
async fn keys_are_fetched_again_for_a_new_one_but_not_for_everybody_who_makes_one_up() {
    let (old, new) = (Key::ed(), Key::p256());
    let issuer = Issuer::start(&[("old", &old)]).await;
    let front = Front::start(issuer.section(json!({})), &[]).await;
    assert_eq!(front.ask(Some(&old.good("old", json!({})))).await.status, OK);
    let made_up = old.good("made-up", json!({}));
    for _ in 0..5 {
        assert_eq!(front.ask(Some(&made_up)).await.status, UNAUTHORIZED);
    }
    assert_eq!(issuer.asked(), 1, "the set was fresh");

    // Rotation: the first token of the new key has it fetched, once.
    issuer.publish(&[("old", &old), ("new", &new)]);
    pass(Duration::from_secs(11)).await;
    assert_eq!(front.ask(Some(&new.good("new", json!({})))).await.status, OK);
    assert_eq!(front.ask(Some(&old.good("old", json!({})))).await.status, OK);
    assert_eq!(front.ask(Some(&made_up)).await.status, UNAUTHORIZED);
    assert_eq!(issuer.asked(), 2);

    // The issuer is down, or answers nonsense: the last good set stays. Of a key that is not in it nobody can say.
    let huge = format!(r#"{{"keys":[],"x":"{}"}}"#, "x".repeat(300 << 10));
    for broken in [None, Some("<html>"), Some(r#"{"keys":[]}"#), Some(huge.as_str())] {
        issuer.answer(broken);
        pass(Duration::from_secs(61)).await;
        let before = issuer.asked();
        for _ in 0..3 {
            let answer = front.ask(Some(&made_up)).await;
            assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{answer:?}");
            assert_eq!(answer.header("retry-after"), "1");
        }
        assert_eq!(issuer.asked(), before + 1, "it backs off");
        assert_eq!(front.ask(Some(&old.good("old", json!({})))).await.status, OK);
    }

    // A key that was taken out is refused once its set is old.
    issuer.publish(&[("new", &new)]);
    pass(Duration::from_secs(301)).await;
    assert_eq!(front.ask(Some(&new.good("new", json!({})))).await.status, OK);
    front.until(&old.good("old", json!({})), UNAUTHORIZED).await;
}

#[tokio::test]
async fn an_issuer_that_never_answered_makes_nobody_a_stranger() {
    let key = Key::ed();
    let issuer = Issuer::start(&[]).await;
    issuer.answer(None);
    let front = Front::start(issuer.section(json!({})), &[("MCP_SERVER_API_KEYS", &format!("alice:{ALICE}"))]).await;
    let token = key.good("k", json!({}));
    assert_eq!(front.ask(Some(&token)).await.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(front.ask(Some(ALICE)).await.status, OK, "keys need no issuer");
    issuer.publish(&[("k", &key)]);
    pass(Duration::from_secs(61)).await;
    assert_eq!(front.ask(Some(&token)).await.status, OK);
}

#[tokio::test]
async fn who_has_no_token_is_told_where_to_get_one() {
    let key = Key::ed();
    let issuer = Issuer::start(&[("k", &key)]).await;
    let mut section = issuer.section(json!({}));
    let front = Front::start(section.clone(), &[]).await;
    let well_known = "/.well-known/oauth-protected-resource";
    let answer = front.ask(None).await;
    assert_eq!(answer.status, UNAUTHORIZED);
    let document = format!("http://{}{well_known}/mcp", front.addr);
    assert_eq!(answer.header("www-authenticate"), format!("Bearer resource_metadata=\"{document}\""));
    for path in [well_known.to_owned(), format!("{well_known}/mcp")] {
        let answer = front.send(Method::GET, &path, &[], Value::Null).await;
        assert_eq!(answer.status, OK);
        let expected = json!({"resource": format!("http://{}/mcp", front.addr), "authorization_servers": [ISSUER],
            "bearer_methods_supported": ["header"], "resource_name": "Tollway"});
        assert_eq!(answer.body, expected);
        let other = front.send(Method::POST, &path, &[], Value::Null).await;
        assert_eq!(other.status, StatusCode::METHOD_NOT_ALLOWED);
    }

    section["http"] = json!({"public_url": "https://tollway.example/"});
    section["auth"]["scopes"] = json!(["pay"]);
    section["auth"]["authorization_servers"] = json!(["https://login.example"]);
    let front = Front::start(section, &[]).await;
    let challenge = "Bearer resource_metadata=\"https://tollway.example/.well-known/oauth-protected-resource/mcp\"";
    let answer = front.ask(Some("wrong")).await;
    let expected = format!("{challenge}, error=\"invalid_token\", scope=\"pay\"");
    assert_eq!(answer.header("www-authenticate"), expected);
    let answer = front.send(Method::GET, well_known, &[], Value::Null).await;
    assert_eq!(answer.body["resource"], "https://tollway.example/mcp");
    assert_eq!(answer.body["authorization_servers"], json!(["https://login.example"]));
    assert_eq!(answer.body["scopes_supported"], json!(["pay"]));

    // Where everybody may ask nothing is protected, and no database or signer is needed.
    let public = Front::start(json!({}), &[]).await;
    assert_eq!(public.ask(None).await.status, OK);
    assert_eq!(public.send(Method::GET, well_known, &[], Value::Null).await.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_session_belongs_to_one_agent_and_no_two_methods_make_the_same() {
    let key = Key::ed();
    let issuer = Issuer::start(&[("k", &key)]).await;
    let env = format!("alice:{ALICE},bob:{BOB}");
    let env = [("MCP_SERVER_API_KEYS", env.as_str())];
    let front = Front::start(issuer.section(json!({})), &env).await;
    let (alice, mallory) = (key.good("k", json!({})), key.good("k", json!({"sub": "mallory"})));
    let renewed = key.good("k", json!({"exp": now() + 999}));
    let session = front.session(&alice).await;
    let status = async |session: &str, token: &str| front.within(session, token, "tools/list", json!({})).await.status;
    assert_eq!(status(&session, &alice).await, OK);
    assert_eq!(status(&session, &renewed).await, OK, "a new token of the same agent");
    assert_eq!(status(&session, &mallory).await, StatusCode::NOT_FOUND);
    assert_eq!(status(&session, ALICE).await, StatusCode::NOT_FOUND, "a key's alice is another alice");
    assert_eq!(status(&front.session(ALICE).await, &alice).await, StatusCode::NOT_FOUND);
    assert_eq!(status(&session, BOB).await, StatusCode::NOT_FOUND);

    // Unless that was written down.
    let same = Front::start(issuer.section(json!({"agent_prefix": ""})), &env).await;
    let session = same.session(ALICE).await;
    let status = async |token: &str| same.within(&session, token, "tools/list", json!({})).await.status;
    assert_eq!((status(&alice).await, status(&mallory).await), (OK, StatusCode::NOT_FOUND));

    // The name can come from another claim.
    let section = issuer.section(json!({"identity_claim": "client_id", "agent_prefix": "team:"}));
    let named = Front::start(section, &env).await;
    let session = named.session(&key.good("k", json!({"client_id": "c1", "sub": null}))).await;
    let status = async |change| named.within(&session, &key.good("k", change), "tools/list", json!({})).await.status;
    assert_eq!(status(json!({"client_id": "c1", "sub": "another"})).await, OK);
    assert_eq!(status(json!({"client_id": "c2"})).await, StatusCode::NOT_FOUND);
    assert_eq!(status(json!({"sub": "c1"})).await, UNAUTHORIZED);
}

#[test]
fn a_configuration_that_would_believe_too_much_is_refused() {
    let good = json!({"issuer": ISSUER, "audiences": [AUDIENCE], "jwks_url": "https://issuer.example/jwks?p=1"});
    let refused = |change: Value| {
        let mut jwt = good.clone();
        jwt.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        parse(json!({"auth": {"jwt": jwt}}), &[]).map(|_| "nothing".to_owned()).unwrap_or_else(|e| e.field)
    };
    assert_eq!(refused(json!({})), "nothing");
    for (change, field) in [
        (json!({"algorithms": ["HS256"]}), "auth.jwt.algorithms"),
        (json!({"algorithms": ["none"]}), "auth.jwt.algorithms"),
        (json!({"algorithms": []}), "auth.jwt.algorithms"),
        (json!({"audiences": []}), "auth.jwt.audiences"),
        (json!({"audiences": [""]}), "auth.jwt.audiences"),
        (json!({"issuer": ""}), "auth.jwt.issuer"),
        (json!({"jwks_url": "http://issuer.example/jwks"}), "auth.jwt.jwks_url"),
        (json!({"jwks_url": "file:///etc/keys"}), "auth.jwt.jwks_url"),
        (json!({"jwks_url": "https://u:p@issuer.example"}), "auth.jwt.jwks_url"),
        (json!({"leeway_seconds": 301}), "auth.jwt.leeway_seconds"),
        (json!({"agent_prefix": "a b"}), "auth.jwt.agent_prefix"),
        (json!({"typ": ""}), "auth.jwt.typ"),
    ] {
        assert_eq!(refused(change.clone()), field, "{change}");
    }
    let other = |more: Value| parse(more, &[]).map(|_| "nothing".to_owned()).unwrap_or_else(|e| e.field);
    assert_eq!(other(json!({"auth": {"scopes": ["a b"]}})), "auth.scopes");
    assert_eq!(other(json!({"auth": {"authorization_servers": ["x"]}})), "auth.authorization_servers");
    assert_eq!(other(json!({"http": {"public_url": "https://t.example/mcp"}})), "http.public_url");
    assert_eq!(
        other(json!({"http": {"rate_limit": {"requests_per_second": 0}}})),
        "http.rate_limit.requests_per_second"
    );
}

#[test]
fn each_method_lets_a_signer_run_and_without_one_it_does_not() {
    let signer = json!({"mode": "external", "base_url": "https://signer.example"});
    let start = |auth: Value, env: &[(&'static str, &str)]| {
        let more = json!({"signer": signer, "auth": auth});
        let mut all = vec![("MCP_SIGNER_AUTH_HEADER", "Bearer x")];
        all.extend(env);
        parse(more, &all).map(|config| config.signer.can_pay()).map_err(|error| error.to_string())
    };
    let refused = start(json!({}), &[]).unwrap_err();
    for way in ["MCP_SERVER_API_KEYS", "http.api_keys_file", "auth.jwt", "auth.kubernetes"] {
        assert!(refused.contains(way), "{refused}");
    }
    assert_eq!(start(json!({"scopes": ["pay"]}), &[]), Err(refused), "what describes tokens takes none");
    assert_eq!(start(json!({}), &[("MCP_SERVER_API_KEYS", &format!("alice:{ALICE}"))]), Ok(true));
    let jwt = json!({"issuer": ISSUER, "audiences": [AUDIENCE], "jwks_url": "https://issuer.example/jwks"});
    assert_eq!(start(json!({"jwt": jwt}), &[]), Ok(true));
    assert_eq!(start(json!({"kubernetes": {"audiences": ["tollway"]}}), &[]), Ok(true));
}
