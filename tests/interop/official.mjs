// What both facilitator scripts share: the official scheme with one account, against one RPC.
import { ExactStellarScheme } from "@x402/stellar/exact/facilitator";
import { createEd25519Signer } from "@x402/stellar";

export const NETWORK = "stellar:testnet";

export function officialScheme(rpcUrl, secret) {
  if (!rpcUrl || !secret) {
    console.error("an RPC URL and FACILITATOR_SECRET are needed");
    process.exit(2);
  }
  const signer = createEd25519Signer(secret, NETWORK);
  return { scheme: new ExactStellarScheme([signer], { rpcConfig: { url: rpcUrl } }), address: signer.address };
}
