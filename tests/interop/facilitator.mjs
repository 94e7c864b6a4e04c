// The official facilitator over plain HTTP: POST /verify, POST /settle, GET /supported.
//   FACILITATOR_SECRET=S… node facilitator.mjs <port> <rpcUrl>
// Prints one line {"url": …, "address": …} when it serves (port 0: any free one).
import { createServer } from "node:http";
import { once } from "node:events";
import { x402Facilitator } from "@x402/core/facilitator";
import { officialScheme, NETWORK } from "./official.mjs";

const [port, rpcUrl] = process.argv.slice(2);
const { scheme, address } = officialScheme(rpcUrl, process.env.FACILITATOR_SECRET);
const facilitator = new x402Facilitator().register(NETWORK, scheme);

const answer = async (request) => {
  if (request.method === "GET" && request.url === "/supported") return facilitator.getSupported();
  if (request.method !== "POST") return undefined;
  const chunks = [];
  for await (const chunk of request) chunks.push(chunk);
  const { paymentPayload, paymentRequirements } = JSON.parse(Buffer.concat(chunks).toString("utf8"));
  if (request.url === "/verify") return facilitator.verify(paymentPayload, paymentRequirements);
  if (request.url === "/settle") return facilitator.settle(paymentPayload, paymentRequirements);
  return undefined;
};

const server = createServer(async (request, response) => {
  let status = 200;
  let body;
  try {
    body = await answer(request);
    if (body === undefined) [status, body] = [404, { error: "not found" }];
  } catch (error) {
    [status, body] = [500, { error: String(error?.message ?? error) }];
  }
  response.writeHead(status, { "content-type": "application/json" });
  response.end(JSON.stringify(body));
});
server.listen(Number(port), "127.0.0.1");
await once(server, "listening");
console.log(JSON.stringify({ url: `http://127.0.0.1:${server.address().port}`, address }));
