// The official Stellar SDK reads a node of the local network: health, ledger, balance of a trustline, events.
//   node sdk.mjs <rpcUrl> <account> <contract>
import { rpc, Asset, xdr } from "@stellar/stellar-sdk";

const [url, account, contract] = process.argv.slice(2);
const server = new rpc.Server(url, { allowHttp: true });
const health = await server.getHealth();
const network = await server.getNetwork();
const latest = await server.getLatestLedger();
const loaded = await server.getAccount(account);
const events = await server.getEvents({
  startLedger: health.oldestLedger,
  filters: [{ type: "contract", contractIds: [contract], topics: [[xdr.ScVal.scvSymbol("transfer").toXDR("base64"), "**"]] }],
  limit: 100,
});
const usdc = new Asset("USDC", "GBBD47IF6LWK7P7MDEVSCWR7DPUWV3NY3DTQEVFL4NAT4AQH3ZLLFLA5");
const line = await server.getTrustline(account, usdc);
const transactions = [];
for (const event of events.events) transactions.push((await server.getTransaction(event.txHash)).status);
const feeStats = await server.getFeeStats();
console.log(
  JSON.stringify({
    status: health.status,
    passphrase: network.passphrase,
    contract: usdc.contractId(network.passphrase),
    sequence: latest.sequence,
    account: loaded.accountId(),
    balance: line.balance().toString(),
    transactions,
    inclusionFee: feeStats.inclusionFee.min,
  }),
);
