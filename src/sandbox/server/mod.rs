//! The demo's MCP server: tools, one resource and one prompt. It knows nothing of payments; the gate in front of it does.

mod tools;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use aws_lc_rs::hmac;
use futures_util::future::BoxFuture;
use serde_json::json;
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};

pub use self::tools::{ASKS, QUESTION, TOOLS, Tool};
use crate::json::{self as strict, Numbers, member, string};
use crate::mcp::{Handler, RequestContext, Revision, RpcError, code};
use crate::ports::World;

/// The one resource, and the one prompt with its one argument.
pub const RESOURCE: &str = "demo://almanac";
pub const PROMPT: &str = "weather_report";

pub struct Server {
    /// Of the states that it gives to who is asked something.
    state_key: hmac::Key,
    runs: AtomicU64,
}

/// One `tools/call`, whose arguments fit.
pub struct Call<'a> {
    pub tool: &'static Tool,
    pub argument: String,
    /// SHA-256 of tool and canonical arguments.
    pub hash: [u8; 32],
    input_responses: Option<&'a RawValue>,
    request_state: Option<&'a RawValue>,
}

pub enum Input {
    /// What is answered instead of running the tool.
    Ask(Box<RawValue>),
    /// The size of the party, where that was the question.
    Answered(Option<u64>),
}

impl<'a> Call<'a> {
    /// `Err` is the answer: a tool error for arguments that do not fit.
    pub fn read(params: &'a RawValue) -> Result<Call<'a>, Result<Box<RawValue>, RpcError>> {
        let invalid = |what: &str| Err(RpcError::invalid_params(what));
        let name = member(params, "name").and_then(string).ok_or_else(|| invalid("params.name is missing"))?;
        let tool = Tool::named(&name).ok_or_else(|| invalid("there is no such tool"))?;
        let arguments = member(params, "arguments").map_or_else(|| strict::raw(&json!({})), ToOwned::to_owned);
        let argument = tool.argument(&arguments).map_err(|problem| Ok(tool_error(&problem)))?.into_owned();
        let canonical = strict::canonical(&arguments, Numbers::AsWritten).map_err(|_| invalid("params.arguments"))?;
        Ok(Call {
            tool,
            argument,
            hash: Sha256::digest(json!([tool.name, canonical]).to_string()).into(),
            input_responses: member(params, "inputResponses"),
            request_state: member(params, "requestState"),
        })
    }
}

fn tool_error(text: &str) -> Box<RawValue> {
    strict::raw(&json!({"isError": true, "content": [{"type": "text", "text": text}]}))
}

impl Server {
    pub fn new(world: &World) -> Arc<Server> {
        let secret: [u8; 32] = world.random();
        Arc::new(Server { state_key: hmac::Key::new(hmac::HMAC_SHA256, &secret), runs: AtomicU64::new(0) })
    }

    /// How often something of it ran to its output.
    pub fn runs(&self) -> u64 {
        self.runs.load(Ordering::SeqCst)
    }

    /// The raw result of `tools/list`.
    pub fn tools() -> Box<RawValue> {
        let entry = |tool: &Tool| json!({"name": tool.name, "description": tool.description, "inputSchema": tool.input_schema()});
        strict::raw(&json!({"tools": TOOLS.iter().map(entry).collect::<Vec<_>>()}))
    }

    pub fn run(&self, call: &Call<'_>, party: Option<u64>) -> serde_json::Value {
        self.runs.fetch_add(1, Ordering::SeqCst);
        call.tool.run(&call.argument, party)
    }

    /// The tool's own question.
    pub fn input(&self, context: &RequestContext, call: &Call<'_>) -> Result<Input, RpcError> {
        if call.tool.name != ASKS {
            return Ok(Input::Answered(None));
        }
        if !context.revision.stateless() {
            return Ok(Input::Ask(tool_error("This tool asks for input, which needs MCP 2026-07-28.")));
        }
        // Sent to a client that cannot ask anybody, the question would be a dead end.
        if context.client_capabilities().is_none_or(|capabilities| member(capabilities, "elicitation").is_none()) {
            return Err(RpcError::missing_capability(&strict::raw(&json!({"elicitation": {"form": {}}}))));
        }
        let state = hex::encode(hmac::sign(&self.state_key, &call.hash));
        let Some(responses) = call.input_responses else {
            let size = json!({"type": "integer", "minimum": 1, "maximum": 20});
            return Ok(Input::Ask(strict::raw(&json!({
                "resultType": "input_required",
                "inputRequests": {QUESTION: {
                    "method": "elicitation/create",
                    "params": {
                        "mode": "form",
                        "message": format!("For how many people should I book at {}?", call.argument),
                        "requestedSchema": {"type": "object", "properties": {"size": size}, "required": ["size"]},
                    },
                }},
                "requestState": state,
            }))));
        };
        // The state names the call that the question was asked for, so an answer serves no other call.
        if call.request_state.and_then(string).as_deref() != Some(&state) {
            return Err(RpcError::invalid_params("requestState is not of this call"));
        }
        let answer = member(responses, QUESTION);
        match answer.and_then(|answer| member(answer, "action")).and_then(string).as_deref() {
            Some("accept") => {}
            Some("decline" | "cancel") => return Ok(Input::Ask(tool_error("Not booked."))),
            _ => return Err(RpcError::invalid_params("inputResponses has no answer to the question")),
        }
        let content = answer.and_then(|answer| member(answer, "content"));
        let size = content.and_then(|content| member(content, "size")).and_then(|size| size.get().parse::<u64>().ok());
        match size {
            Some(size) if (1..=20).contains(&size) => Ok(Input::Answered(Some(size))),
            _ => Err(RpcError::invalid_params("size must be an integer from 1 to 20")),
        }
    }

    fn tools_call(&self, context: &RequestContext, params: &RawValue) -> Result<Box<RawValue>, RpcError> {
        let call = match Call::read(params) {
            Ok(call) => call,
            Err(refused) => return refused,
        };
        Ok(match self.input(context, &call)? {
            Input::Ask(asked) => asked,
            Input::Answered(party) => strict::raw(&self.run(&call, party)),
        })
    }

    fn resources_read(&self, params: &RawValue) -> Result<Box<RawValue>, RpcError> {
        if member(params, "uri").and_then(string).as_deref() != Some(RESOURCE) {
            return Err(RpcError::new(code::RESOURCE_NOT_FOUND, "there is no such resource"));
        }
        self.runs.fetch_add(1, Ordering::SeqCst);
        let text = "January is cold, July is warm, and April does what it likes.";
        Ok(strict::raw(&json!({"contents": [{"uri": RESOURCE, "mimeType": "text/plain", "text": text}]})))
    }

    fn prompts_get(&self, params: &RawValue) -> Result<Box<RawValue>, RpcError> {
        let invalid = |what: &str| RpcError::invalid_params(what);
        if member(params, "name").and_then(string).as_deref() != Some(PROMPT) {
            return Err(invalid("there is no such prompt"));
        }
        let city = member(params, "arguments").and_then(|arguments| member(arguments, "city")).and_then(string);
        let city = city.filter(|city| (1..=200).contains(&city.chars().count()));
        let city = city.ok_or_else(|| invalid("arguments.city must be a string of 1 to 200 characters"))?;
        self.runs.fetch_add(1, Ordering::SeqCst);
        let text =
            format!("Call get_weather for {city}, and write two sentences about it that make one want to go out.");
        Ok(strict::raw(&json!({"messages": [{"role": "user", "content": {"type": "text", "text": text}}]})))
    }
}

impl Handler for Server {
    fn server_info(&self) -> (&str, &str, Option<&str>) {
        ("tollway-demo-server", env!("CARGO_PKG_VERSION"), Some("Weather, markets, research and tables: a demo."))
    }

    fn capabilities(&self, _revision: Revision) -> Box<RawValue> {
        strict::raw(&json!({"tools": {}, "resources": {}, "prompts": {}}))
    }

    fn call<'a>(
        &'a self,
        context: &'a RequestContext,
        method: &'a str,
        params: Option<&'a RawValue>,
    ) -> BoxFuture<'a, Result<Box<RawValue>, RpcError>> {
        Box::pin(async move {
            match (method, params) {
                ("tools/list", _) => Ok(Server::tools()),
                ("resources/list", _) => Ok(strict::raw(&json!({"resources": [{
                    "uri": RESOURCE, "name": "almanac", "description": "What the months are like.", "mimeType": "text/plain",
                }]}))),
                ("resources/templates/list", _) => Ok(strict::raw(&json!({"resourceTemplates": []}))),
                ("prompts/list", _) => Ok(strict::raw(&json!({"prompts": [{
                    "name": PROMPT,
                    "description": "A cheerful report about the weather in one city.",
                    "arguments": [{"name": "city", "required": true}],
                }]}))),
                ("tools/call", Some(params)) => self.tools_call(context, params),
                ("resources/read", Some(params)) => self.resources_read(params),
                ("prompts/get", Some(params)) => self.prompts_get(params),
                ("tools/call" | "resources/read" | "prompts/get", None) => {
                    Err(RpcError::invalid_params("params is missing"))
                }
                _ => Err(RpcError::method_not_found(method)),
            }
        })
    }
}
