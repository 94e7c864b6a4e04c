// The official MCP client drives Tollway's tools.
//   node mcp-client.mjs http <url> <bearer> <query> <network> <asset> <max>
//   node mcp-client.mjs stdio <command> <argsJson> <query>
// Prints one JSON document: tool names, what search found, and over HTTP what a paid call gave.
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import { StdioClientTransport } from "@modelcontextprotocol/sdk/client/stdio.js";

const [mode, ...args] = process.argv.slice(2);
const client = new Client({ name: "interop", version: "1.0.0" });
let transport;
if (mode === "http") {
  const [url, bearer] = args;
  transport = new StreamableHTTPClientTransport(new URL(url), {
    requestInit: { headers: { Authorization: `Bearer ${bearer}` } },
  });
} else if (mode === "stdio") {
  const [command, argsJson] = args;
  transport = new StdioClientTransport({ command, args: JSON.parse(argsJson), env: process.env, stderr: "inherit" });
} else {
  console.error("mode http or stdio");
  process.exit(2);
}
await client.connect(transport);
// listTools also compiles every output schema: the client then validates each structured result against it.
const { tools } = await client.listTools();
const out = { protocol: transport.protocolVersion, tools: tools.map((t) => t.name).sort() };
const query = mode === "http" ? args[2] : args[2];
const search = await client.callTool({ name: "x402_search_resources", arguments: { query, type: "mcp" } });
out.search = search;
if (mode === "http") {
  const [, , , network, asset, max] = args;
  const ref = search.structuredContent.resources[0].wrapper.ref;
  out.get = await client.callTool({ name: "x402_get_resource", arguments: { ref } });
  const paid = {
    ref,
    network,
    scheme: "exact",
    asset,
    maxAtomicAmount: max,
    arguments: {},
    idempotencyKey: "interop-official-client-1",
  };
  out.call = await client.callTool({ name: "x402_call_resource", arguments: paid }, undefined, { timeout: 60000 });
  out.again = await client.callTool({ name: "x402_call_resource", arguments: paid }, undefined, { timeout: 60000 });
  out.refused = await client.callTool({ name: "x402_call_resource", arguments: { ...paid, surprise: true } });
  out.budget = await client.callTool({ name: "x402_get_budget", arguments: {} });
  out.payment = await client.callTool({
    name: "x402_get_payment",
    arguments: { idempotencyKey: "interop-official-client-1" },
  });
}
console.log(JSON.stringify(out));
await client.close();
