//! What the demo seller sells. The answers are computed from the arguments, so that the same call has the same answer.

use serde_json::json;
use serde_json::value::RawValue;

use crate::json::{self as strict, string};

pub struct Tool {
    pub name: &'static str,
    pub description: &'static str,
    /// Atomic units; `None` is free.
    pub price: Option<u64>,
    /// The one argument, a string that must be there.
    pub argument: &'static str,
    pub example: &'static str,
    pub tags: &'static [&'static str],
}

pub const TOOLS: [Tool; 5] = [
    Tool {
        name: "ping",
        description: "Answers pong. Free.",
        price: None,
        argument: "message",
        example: "hello",
        tags: &[],
    },
    Tool {
        name: "get_weather",
        description: "Current weather in one city: temperature in degrees Celsius and a word for the sky.",
        price: Some(10_000),
        argument: "city",
        example: "San Francisco",
        tags: &["weather", "forecast"],
    },
    Tool {
        name: "get_market_report",
        description: "A short market report about one ticker symbol, with trend and volume.",
        price: Some(250_000),
        argument: "symbol",
        example: "XLM",
        tags: &["market", "finance"],
    },
    Tool {
        name: "run_deep_research",
        description: "An exhaustive research paper about one topic. Expensive.",
        price: Some(50_000_000),
        argument: "topic",
        example: "payment channels",
        tags: &["research"],
    },
    Tool {
        name: "book_table",
        description: "Books a table in a restaurant. Asks for the size of the party before it charges.",
        price: Some(20_000),
        argument: "restaurant",
        example: "Chez Panisse",
        tags: &["booking", "restaurant"],
    },
];

/// The tool that asks for input, and the name of its one question.
pub const ASKS: &str = "book_table";
pub const QUESTION: &str = "party";

impl Tool {
    pub fn named(name: &str) -> Option<&'static Tool> {
        TOOLS.iter().find(|tool| tool.name == name)
    }

    pub fn input_schema(&self) -> serde_json::Value {
        let mut schema = json!({
            "type": "object",
            "properties": {self.argument: {"type": "string", "minLength": 1, "maxLength": 200}},
            "additionalProperties": false,
        });
        if self.price.is_some() {
            schema["required"] = json!([self.argument]);
        }
        schema
    }

    /// `Err` says in one sentence what is wrong.
    pub fn argument<'a>(&self, arguments: &'a RawValue) -> Result<std::borrow::Cow<'a, str>, String> {
        let members = strict::members(arguments).map_err(|_| "arguments must be an object".to_owned())?;
        let mut found = None;
        for (name, value) in members {
            if name != self.argument {
                return Err(format!("the only argument of {} is {}", self.name, self.argument));
            }
            found = string(value).filter(|text| (1..=200).contains(&text.chars().count()));
        }
        match found {
            Some(text) => Ok(text),
            None if self.price.is_none() => Ok("".into()),
            None => Err(format!("{} needs {}, a string of 1 to 200 characters", self.name, self.argument)),
        }
    }

    /// The `CallToolResult` without `_meta`. `party` is the answer to the question, where one was asked.
    pub fn run(&self, argument: &str, party: Option<u64>) -> serde_json::Value {
        let seed = argument.bytes().fold(7_u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)));
        let (text, structured) = match self.name {
            "ping" => return json!({"content": [{"type": "text", "text": "pong"}]}),
            "get_weather" => {
                let (degrees, sky) = (seed % 35, ["sunny", "cloudy", "rainy", "windy"][(seed % 4) as usize]);
                (
                    format!("It is {sky} in {argument}, {degrees} degrees."),
                    json!({"city": argument, "temperature": degrees, "sky": sky}),
                )
            }
            "get_market_report" => {
                let trend = ["up", "down", "flat"][(seed % 3) as usize];
                (
                    format!("{argument} is {trend}."),
                    json!({"symbol": argument, "trend": trend, "volume": seed % 1_000_000}),
                )
            }
            ASKS => {
                let size = party.unwrap_or(2);
                (
                    format!("A table for {size} at {argument} is booked."),
                    json!({"restaurant": argument, "partySize": size, "confirmation": format!("T{:06}", seed % 1_000_000)}),
                )
            }
            _ => (
                format!("Everything there is to know about {argument}: it depends."),
                json!({"topic": argument, "pages": 1 + seed % 100}),
            ),
        };
        json!({"content": [{"type": "text", "text": text}], "structuredContent": structured})
    }

    /// The `bazaar` extension, in the challenge and in the catalog alike.
    pub fn bazaar(&self) -> serde_json::Value {
        json!({
            "info": {
                "input": {
                    "type": "mcp",
                    "toolName": self.name,
                    "description": self.description,
                    "transport": "streamable-http",
                    "inputSchema": self.input_schema(),
                    "example": {self.argument: self.example},
                },
            },
            "schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {
                    "input": {
                        "type": "object",
                        "properties": {
                            "type": {"type": "string", "const": "mcp"},
                            "toolName": {"type": "string"},
                            "description": {"type": "string"},
                            "transport": {"type": "string", "enum": ["streamable-http"]},
                            "inputSchema": {"type": "object"},
                            "example": {"type": "object"},
                        },
                        "required": ["type", "toolName", "inputSchema"],
                        "additionalProperties": false,
                    },
                },
                "required": ["input"],
            },
        })
    }
}
