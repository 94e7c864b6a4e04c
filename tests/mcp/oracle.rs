//! The Rust SDK's client as a witness: what it lists and calls is what we serve.

use rmcp::ServiceExt as _;
use rmcp::model::CallToolRequestParams;
use tollway::mcp::stdio;

use super::{fixture, settings};

#[tokio::test]
async fn the_rust_sdk_lists_and_calls_over_pipes() {
    let (ours, theirs) = tokio::io::duplex(1 << 16);
    let (read, write) = tokio::io::split(theirs);
    let settings = settings();
    settings.world.spawn.clone().spawn(Box::pin(async move {
        let _ = stdio(settings, fixture(), "local".parse().unwrap(), read, write).await;
    }));
    let client = ().serve(tokio::io::split(ours)).await.unwrap();
    let tools = client.list_all_tools().await.unwrap();
    assert_eq!(tools[0].name, "echo");
    let arguments = serde_json::json!({"a": 1}).as_object().cloned();
    let mut call = CallToolRequestParams::new("echo");
    call.arguments = arguments;
    let result = client.call_tool(call).await.unwrap();
    assert_eq!(result.structured_content, Some(serde_json::json!({"a": 1})));
    client.cancel().await.unwrap();
}
