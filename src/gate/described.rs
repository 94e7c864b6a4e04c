//! What is said of a priced item before anybody is asked to pay for it.

use serde_json::json;
use serde_json::value::RawValue;

use super::schema::{self, Fit};
use crate::json;
use crate::mcp::{Revision, RpcError, bounded};
use crate::telemetry;

/// What the upstream says of a priced item before anybody is asked to pay for it.
pub enum Described {
    /// The arguments fit. `tool`: the tool's raw entry in the upstream's `tools/list`, where there is one.
    Fits { tool: Option<Box<RawValue>> },
    /// The upstream has no such item, or the arguments do not fit: the answer in the form of the revision.
    Refused(Result<Box<RawValue>, RpcError>),
}

impl Described {
    /// By the input schema of a tool's raw `entry`. One that decides nothing is skipped, and counted.
    pub fn by(entry: &RawValue, arguments: &RawValue, revision: Revision) -> Described {
        let fit = json::member(entry, "inputSchema").map_or(Fit::Yes, |schema| schema::fits(schema, arguments));
        match fit {
            Fit::Yes => {}
            Fit::Unknown => telemetry::GATE_SCHEMAS_SKIPPED.one([]),
            Fit::No(why) => {
                let name = json::member(entry, "name").and_then(json::string).unwrap_or_default();
                return Described::unfit(&name, &why, revision);
            }
        }
        Described::Fits { tool: Some(entry.to_owned()) }
    }

    /// Since 2025-11-25 arguments that do not fit are the tool's error, which a model can read and correct.
    fn unfit(name: &str, why: &str, revision: Revision) -> Described {
        let text = format!("Invalid arguments for tool {}: {}", bounded(name), bounded(why));
        if revision < Revision::V2025_11_25 {
            return Described::Refused(Err(RpcError::invalid_params(text)));
        }
        let mut result = json!({"content": [{"type": "text", "text": text}], "isError": true});
        if revision.stateless() {
            result["resultType"] = json!("complete");
        }
        Described::Refused(Ok(json::raw(&result)))
    }
}
