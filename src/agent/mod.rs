//! The MCP server for agents: tools, transports, the one map from error to tool result.
