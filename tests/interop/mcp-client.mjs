// The official MCP client, driven line by line.
//   node mcp-client.mjs
// The first line of standard input is one entry of a client configuration's `mcpServers`; the answer is
// {"protocol", "server", "tools", "refuses"}: `refuses` has, for each tool, whether its output schema, as the client
// compiled it, refuses an empty object. Every further line is {"tool", "arguments"}; its answer is {"result",
// "validated"}: what the client's validator said of each structured result during this call, or {"thrown"}. At the end
// of standard input the session is ended and {"stray"} printed: what came in and was no answer.
import { createInterface } from "node:readline";
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import { StdioClientTransport } from "@modelcontextprotocol/sdk/client/stdio.js";
import { AjvJsonSchemaValidator } from "@modelcontextprotocol/sdk/validation/ajv";

const print = (value) => console.log(JSON.stringify(value));
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const entry = JSON.parse((await lines.next()).value);

// The client's own validator, with a record of what it said.
const ajv = new AjvJsonSchemaValidator();
let validated = [];
const jsonSchemaValidator = {
  getValidator(schema) {
    const validate = ajv.getValidator(schema);
    return (value) => {
      const verdict = validate(value);
      validated.push({ valid: verdict.valid, code: value.code ?? null });
      return verdict;
    };
  },
};

const transport = entry.url
  ? new StreamableHTTPClientTransport(new URL(entry.url), { requestInit: { headers: entry.headers } })
  : new StdioClientTransport({ command: entry.command, args: entry.args, env: entry.env, stderr: "inherit" });
const client = new Client({ name: "interop", version: "1.0.0" }, { jsonSchemaValidator });
const stray = [];
client.onerror = (error) => stray.push(String(error));
let protocol;
const negotiated = transport.setProtocolVersion?.bind(transport);
transport.setProtocolVersion = (version) => {
  protocol = version;
  negotiated?.(version);
};
await client.connect(transport);
// From here on the client validates every structured result.
const { tools } = await client.listTools();
const refuses = Object.fromEntries(tools.map((tool) => [tool.name, !ajv.getValidator(tool.outputSchema)({}).valid]));
print({ protocol, server: client.getServerVersion(), tools, refuses });

for await (const line of lines) {
  const { tool, arguments: args } = JSON.parse(line);
  validated = [];
  try {
    const result = await client.callTool({ name: tool, arguments: args }, undefined, { timeout: 120_000 });
    print({ result, validated });
  } catch (error) {
    print({ thrown: String(error), validated });
  }
}
await transport.terminateSession?.();
print({ stray });
await client.close();
