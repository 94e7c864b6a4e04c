// The official MCP clients buy a tool, a resource and a prompt through the gate, with payments of the official x402 client.
//   PAYER_SECRET=S… node gate-client.mjs <gate url> <rpc url> <legacy | modern>
// legacy: @modelcontextprotocol/sdk, the challenge as a tool result. modern: @modelcontextprotocol/client on 2026-07-28,
// which declares org.x402/payment; the client has no part for that extension, so its challenge is read from the wire.
// Prints one line for each item: {"kind", "challenge", "listed", "result", "again"}.
import { x402Client } from "@x402/core/client";
import { ExactStellarScheme } from "@x402/stellar/exact/client";
import { createEd25519Signer } from "@x402/stellar";

const [url, rpcUrl, era] = process.argv.slice(2);
const signer = createEd25519Signer(process.env.PAYER_SECRET, "stellar:testnet");
const payer = new x402Client().register("stellar:testnet", new ExactStellarScheme(signer, { url: rpcUrl }));

async function connect() {
  if (era === "legacy") {
    const { Client } = await import("@modelcontextprotocol/sdk/client/index.js");
    const { StreamableHTTPClientTransport } = await import("@modelcontextprotocol/sdk/client/streamableHttp.js");
    const transport = new StreamableHTTPClientTransport(new URL(url));
    return [new Client({ name: "interop", version: "1.0.0" }), transport];
  }
  const { Client, StreamableHTTPClientTransport } = await import("@modelcontextprotocol/client");
  const capabilities = { extensions: { "org.x402/payment": {} } };
  const options = { capabilities, versionNegotiation: { mode: { pin: "2026-07-28" } } };
  const transport = new StreamableHTTPClientTransport(new URL(url));
  return [new Client({ name: "interop", version: "1.0.0" }, options), transport];
}

const [client, transport] = await connect();
await client.connect(transport);
// What came over the wire last, whatever the client makes of it.
let wire;
const deliver = transport.onmessage;
transport.onmessage = (message, extra) => {
  if (message.result) wire = message.result;
  return deliver(message, extra);
};

const items = [
  ["tool", (_meta) => client.callTool({ name: "research", arguments: { topic: "bees" }, _meta })],
  ["resource", (_meta) => client.readResource({ uri: "docs://42", _meta })],
  ["prompt", (_meta) => client.getPrompt({ name: "brief", arguments: { topic: "bees" }, _meta })],
];
const listed = (await client.listTools()).tools.find((tool) => tool.name === "research");
for (const [kind, ask] of items) {
  let challenge;
  if (era === "legacy") {
    const result = await ask(undefined);
    challenge = result.structuredContent;
    if (JSON.stringify(challenge) !== result.content[0].text) throw new Error("the two copies differ");
    if (result.isError !== true) throw new Error("the challenge is no error");
  } else {
    try {
      await ask(undefined);
      throw new Error("no challenge");
    } catch (error) {
      if (wire?.resultType !== "payment_required") throw error;
      challenge = wire.paymentRequired;
    }
  }
  const payment = await payer.createPaymentPayload(challenge);
  payment.extensions = {
    "payment-identifier": { info: { ...challenge.extensions["payment-identifier"].info, id: `pay_${crypto.randomUUID()}` } },
  };
  const paid = { "x402/payment": payment };
  const result = await ask(paid);
  const again = await ask(paid);
  console.log(JSON.stringify({ kind, challenge, listed: listed._meta, result, again }));
}
await client.close();
