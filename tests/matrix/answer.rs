//! What an agent was told, as far as the table distinguishes it.

use serde_json::Value;

#[derive(Debug, Clone)]
pub enum Answer {
    /// The output of a tool, an error of it, or the `data` of a JSON-RPC error.
    Said(Value),
    /// The process died, or nothing came in time.
    Gone(String),
}

impl Answer {
    /// The body of the HTTP answer: one JSON-RPC message, or a stream that ends with it.
    pub fn of(body: &str) -> Answer {
        let events = body.lines().filter_map(|line| line.strip_prefix("data:"));
        let texts = std::iter::once(body).chain(events);
        let mut messages = texts.filter_map(|text| serde_json::from_str::<Value>(text).ok());
        match messages.rfind(|message| message["id"] == 1) {
            Some(message) if message["error"].is_object() => Answer::Said(message["error"]["data"].clone()),
            Some(message) if message["result"]["structuredContent"].is_object() => {
                Answer::Said(message["result"]["structuredContent"].clone())
            }
            _ => Answer::Gone(body.chars().take(200).collect()),
        }
    }

    fn value(&self) -> &Value {
        match self {
            Answer::Said(value) => value,
            Answer::Gone(_) => &Value::Null,
        }
    }

    /// `paid`, `paid:undelivered`, `state:released:no_answer`, `SETTLEMENT_UNKNOWN/no_answer`, `gone`.
    pub fn label(&self) -> String {
        let value = match self {
            Answer::Gone(_) => return "gone".into(),
            Answer::Said(value) => value,
        };
        let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
        if value["code"].is_string() {
            return format!("{}/{}", text(&value["code"]), text(&value["details"]["reason"]));
        }
        if value["state"].is_string() {
            let reason = value["reason"].as_str().map(|reason| format!(":{reason}")).unwrap_or_default();
            return format!("state:{}{reason}", text(&value["state"]));
        }
        if value["receipt"].is_object() {
            let outcome = value["outcome"].as_str().map(|word| format!(":{word}")).unwrap_or_default();
            let recorded = if value["recorded"] == false { ":unrecorded" } else { "" };
            return format!("paid{outcome}{recorded}");
        }
        "unpaid".into()
    }

    pub fn is_gone(&self) -> bool {
        matches!(self, Answer::Gone(_))
    }

    /// A receipt.
    pub fn is_paid(&self) -> bool {
        self.value()["receipt"].is_object() && self.value()["state"].is_null()
    }

    /// The tool's own output.
    pub fn has_output(&self) -> bool {
        let text = self.value()["content"][0]["text"].as_str().unwrap_or_default();
        text.starts_with("It is ")
    }

    pub fn transaction(&self) -> Option<&str> {
        self.value()["receipt"]["transaction"].as_str()
    }

    /// `no` or `unknown`, of a failure.
    pub fn moved(&self) -> Option<&str> {
        self.value()["details"]["moneyMayHaveMoved"].as_str()
    }

    pub fn payment(&self) -> Option<&str> {
        let value = self.value();
        value["paymentIdentifier"].as_str().or(value["details"]["paymentIdentifier"].as_str())
    }
}
