// The official facilitator verifies and settles one payment.
//   FACILITATOR_SECRET=S… node settle.mjs <rpcUrl> < {"paymentPayload": …, "paymentRequirements": …}
// Prints {"verify": …, "settle": …}; `settle` is null where verify said no. Exit 0 only if it was settled.
import { officialScheme } from "./official.mjs";

const { scheme } = officialScheme(process.argv[2], process.env.FACILITATOR_SECRET);
const chunks = [];
for await (const chunk of process.stdin) chunks.push(chunk);
const { paymentPayload, paymentRequirements } = JSON.parse(Buffer.concat(chunks).toString("utf8"));
const verify = await scheme.verify(paymentPayload, paymentRequirements);
const settle = verify.isValid ? await scheme.settle(paymentPayload, paymentRequirements) : null;
console.log(JSON.stringify({ verify, settle }));
process.exitCode = settle?.success ? 0 : 1;
