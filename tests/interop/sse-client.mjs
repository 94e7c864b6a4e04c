// The official client of the HTTP+SSE transport (2024-11-05) over several replicas: the stream is the first one's, each
// message goes to the next.
//   node sse-client.mjs '{"replicas": ["http://host:port", ...], "token": "...", "calls": 12}'
// Prints {"protocol", "tools", "results", "stray", "posted"}.
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { SSEClientTransport } from "@modelcontextprotocol/sdk/client/sse.js";

const { replicas, token, calls } = JSON.parse(process.argv[2]);
let posted = 0;
const inTurns = (url, init) => {
  const target = new URL(url);
  if (init?.method === "POST") target.host = new URL(replicas[posted++ % replicas.length]).host;
  return fetch(target, init);
};
const transport = new SSEClientTransport(new URL("/sse", replicas[0]), {
  requestInit: { headers: { Authorization: `Bearer ${token}` } },
  fetch: inTurns,
});
const client = new Client({ name: "interop", version: "1.0.0" });
const stray = [];
client.onerror = (error) => stray.push(String(error));
let protocol;
const negotiated = transport.setProtocolVersion?.bind(transport);
transport.setProtocolVersion = (version) => {
  protocol = version;
  negotiated?.(version);
};
await client.connect(transport);
const { tools } = await client.listTools();
const all = Array.from({ length: calls }, (_, n) => client.callTool({ name: "echo", arguments: { n } }));
const results = (await Promise.all(all)).map((result) => result.structuredContent);
console.log(JSON.stringify({ protocol, tools: tools.map((tool) => tool.name), results, stray, posted }));
await client.close();
