// The official client builds a payment; it speaks to an RPC over HTTPS only (NODE_EXTRA_CA_CERTS).
//   PAYER_SECRET=S… node client.mjs <rpcUrl> < paymentRequirements
// Prints the payment payload.
import { ExactStellarScheme } from "@x402/stellar/exact/client";
import { createEd25519Signer } from "@x402/stellar";

const signer = createEd25519Signer(process.env.PAYER_SECRET, "stellar:testnet");
const client = new ExactStellarScheme(signer, { url: process.argv[2] });
const chunks = [];
for await (const chunk of process.stdin) chunks.push(chunk);
const requirements = JSON.parse(Buffer.concat(chunks).toString("utf8"));
const payload = await client.createPaymentPayload(2, requirements);
console.log(JSON.stringify({ ...payload, accepted: requirements, resource: { url: "mcp://tool/interop" } }));
