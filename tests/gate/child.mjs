// An MCP server on standard input and output, without any package.
//   node child.mjs
// Tools: echo (the arguments back, with the raw line), count (calls of this process), progress, ask (asks the client),
// die, log (writes a log message), research (logs its output, then has it), later (answers after a while), never (does
// not answer), pending (how many of those), cancelled (which requests were withdrawn).
import { createInterface } from "node:readline";

const write = (text) => process.stdout.write(`${text}\n`);
console.error(`started ${process.pid}`);
let calls = 0;
const waiting = new Map();
const cancelled = [];
let pending = 0;
const log = (data) => write(JSON.stringify({ jsonrpc: "2.0", method: "notifications/message", params: { level: "info", data } }));
createInterface({ input: process.stdin }).on("line", (line) => {
  const message = JSON.parse(line);
  const id = /"id"\s*:\s*("(?:[^"\\]|\\.)*"|-?\d+)/.exec(line)?.[1];
  const answer = (result) => write(`{"id":${id}, "jsonrpc":"2.0","result":${result}}`);
  if (message.method === undefined) {
    const ask = waiting.get(message.id);
    waiting.delete(message.id);
    write(`{"jsonrpc":"2.0","id":${ask},"result":{"answered":${JSON.stringify(message.result)}}}`);
    return;
  }
  if (message.method === "initialize") {
    answer(`{"protocolVersion":"${message.params.protocolVersion}","capabilities":{"tools":{}},"serverInfo":{"name":"child","version":"1"}}`);
  } else if (message.method === "tools/list") {
    answer(`{"tools":[{"name":"research","inputSchema":{"type":"object"}},{"name":"echo","inputSchema":{"type":"object"}},{"name":"paid","inputSchema":{"type":"object"}}]}`);
  } else if (message.method === "tools/call") {
    const { name, _meta } = message.params;
    if (name === "echo") answer(`{"content":[],"big":100000000000000000000000001,"line":${JSON.stringify(line)}}`);
    else if (name === "count") answer(`{"content":[],"calls":${++calls},"pid":${process.pid}}`);
    else if (name === "progress") {
      write(JSON.stringify({ jsonrpc: "2.0", method: "notifications/progress", params: { progressToken: _meta.progressToken, progress: 1, message: "half" } }));
      answer(`{"content":[]}`);
    } else if (name === "ask") {
      waiting.set(`q${id}`, id);
      write(JSON.stringify({ jsonrpc: "2.0", id: `q${id}`, method: "elicitation/create", params: {} }));
    } else if (name === "die") process.exit(3);
    else if (name === "log") {
      log("free log");
      answer(`{"content":[]}`);
    } else if (name === "research") {
      write(JSON.stringify({ jsonrpc: "2.0", method: "notifications/progress", params: { progressToken: _meta.progressToken, progress: 1, message: "secret progress" } }));
      log(`secret log ${line}`);
      setTimeout(() => answer(`{"content":[{"type":"text","text":"buzz"}]}`), 300);
    } else if (name === "later") setTimeout(() => answer(`{"content":[]}`), 3000);
    else if (name === "never") pending += 1;
    else if (name === "pending") answer(`{"content":[],"pending":${pending}}`);
    else if (name === "cancelled") answer(`{"content":[],"cancelled":${JSON.stringify(cancelled)}}`);
    else answer(`{"content":[],"isError":true}`);
  } else if (message.method === "notifications/cancelled") {
    cancelled.push(message.params.requestId);
  } else if (id !== undefined) {
    write(`{"jsonrpc":"2.0","id":${id},"error":{"code":-32601,"message":"Method not found"}}`);
  }
});
