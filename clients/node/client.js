#!/usr/bin/env node
// A small Shardring client in Node. ../../docs/clients.md says what it takes and prints.
"use strict";

const { readFileSync } = require("node:fs");
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const ROOT = path.join(__dirname, "..", "..");
// A JavaScript number is exact up to 2^53 only, so 64-bit fields are decimal strings. An enum value
// that these protos do not know yet stays a number.
const api = loader.loadSync(
  [
    "shardring/topology/v1/topology_service.proto",
    "shardring/placement/v1/placement_service.proto",
    "shardring/runner/v1/instance_service.proto",
    "google/rpc/status.proto",
    "google/rpc/error_details.proto",
  ],
  {
    includeDirs: [path.join(ROOT, "protos"), path.join(ROOT, "clients", "protos")],
    keepCase: true,
    longs: String,
    enums: String,
    defaults: true,
    oneofs: true,
  },
);
const { topology, placement, runner } = grpc.loadPackageDefinition(api).shardring;

const USAGE = `usage: client COMMAND [ARGUMENT...] [--OPTION VALUE...]
  nodes, links                  [--topology HOST:PORT]
  preview MODEL, place MODEL    [--placement HOST:PORT --min-nodes N --headroom-bytes N]
  start INSTANCE MODEL          the same; starts it on the head of the ring
  generate INSTANCE TEXT        --node HOST:PORT [--max-tokens N --seed N --cancel-after N];
                                TEXT "-" is standard input
  stop INSTANCE                 --node HOST:PORT
  all                           [--timeout SECONDS --keepalive SECONDS --traceparent TEXT]`;
const COMMANDS = {
  nodes: [0, nodes],
  links: [0, links],
  preview: [1, preview],
  place: [1, place],
  start: [2, start],
  generate: [2, generate],
  stop: [1, stop],
};
const DEFAULTS = {
  topology: "127.0.0.1:52410",
  placement: "127.0.0.1:52411",
  node: "",
  "min-nodes": "0",
  "headroom-bytes": "0",
  "max-tokens": "0",
  seed: "",
  "cancel-after": "0",
  timeout: "60",
  keepalive: "10",
  traceparent: "",
};

const TEXTS = ["topology", "placement", "node", "traceparent"];

const options = { ...DEFAULTS };
const channels = [];

function print(line) {
  process.stdout.write(`${line}\n`);
}

// Return a client of a service, whose calls end with `close`.
function connect(Service, address) {
  const client = new Service(address, grpc.credentials.createInsecure(), {
    // A peer that does not answer a ping for this long is gone.
    "grpc.keepalive_time_ms": options.keepalive * 1000,
    "grpc.keepalive_timeout_ms": 10_000,
    "grpc.max_receive_message_length": 64 * 2 ** 20,
    "grpc.enable_http_proxy": 0,
  });
  channels.push(client);
  return client;
}

function close() {
  channels.forEach((client) => client.close());
}

function metadata() {
  const sent = new grpc.Metadata();
  if (options.traceparent) sent.set("traceparent", options.traceparent);
  return sent;
}

function deadline() {
  return { deadline: Date.now() + options.timeout * 1000 };
}

// Return the answer of a unary call.
function call(client, method, request) {
  return new Promise((resolve, reject) => {
    client[method](request, metadata(), deadline(), (error, response) =>
      error ? reject(error) : resolve(response),
    );
  });
}

function address({ address: host, port }) {
  return host.includes(":") ? `[${host}]:${port}` : `${host}:${port}`;
}

async function getTopology() {
  const client = connect(topology.v1.TopologyService, options.topology);
  return (await call(client, "GetTopology", {})).topology ?? { nodes: [], links: [] };
}

async function nodes() {
  for (const node of (await getTopology()).nodes) {
    print(
      `node ${node.node_id} ${address(node.endpoints[0] ?? { address: "", port: 0 })}` +
        ` backends=${node.backends.join(",")} memory_total_bytes=${node.memory_total_bytes}` +
        ` memory_available_bytes=${node.memory_available_bytes} name=${node.name}`,
    );
  }
}

async function links() {
  for (const link of (await getTopology()).links) {
    print(
      `link ${link.source_node_id} ${link.sink_node_id} ${link.sink_address} kind=${link.kind}` +
        ` round_trip_us=${link.round_trip ? microseconds(link.round_trip) : "unknown"}`,
    );
  }
}

function microseconds({ seconds, nanos }) {
  return BigInt(seconds) * 1000000n + BigInt(Math.trunc(nanos / 1000));
}

function wanted(modelId) {
  return {
    model_id: modelId,
    constraints: {
      min_node_count: Number(options["min-nodes"]),
      headroom_bytes: options["headroom-bytes"],
    },
  };
}

async function preview(modelId) {
  const client = connect(placement.v1.PlacementService, options.placement);
  const { previews } = await call(client, "PreviewPlacements", wanted(modelId));
  for (const one of previews) {
    const outcome = one.placement
      ? one.placement.ranks.map((rank) => `${rank.node_name}:${layers(rank)}`).join(" ")
      : `refused ${one.refusal.reason}: ${one.refusal.message}`;
    print(`preview nodes=${one.node_count} ${one.sharding} ${one.ring_backend} ${outcome}`);
  }
}

function layers(rank) {
  return `${rank.layers?.start ?? 0}-${rank.layers?.end ?? 0}`;
}

async function place(modelId, instanceId = "") {
  const client = connect(placement.v1.PlacementService, options.placement);
  const request = { ...wanted(modelId), request_id: instanceId };
  const placed = (await call(client, "Place", request)).placement;
  print(`placement ${placed.model_id} commit=${placed.commit} layer_count=${placed.layer_count}`);
  for (const rank of placed.ranks) {
    print(
      `rank ${rank.rank} ${rank.node_id} ${address(rank.endpoints[0])} layers=${layers(rank)}` +
        ` weight_bytes=${rank.weight_bytes} name=${rank.node_name}`,
    );
  }
  return placed;
}

async function start(instanceId, modelId) {
  const placed = await place(modelId, instanceId);
  const head = address(placed.ranks[0].endpoints[0]);
  const client = connect(runner.v1.InstanceService, head);
  await call(client, "StartInstance", { instance_id: instanceId, placement: placed });
  let state;
  let fault = null;
  const watch = client.WatchInstance({ instance_id: instanceId }, metadata(), deadline());
  const ready = await read(watch, ({ instance }) => {
    if (instance.state !== state) print(`instance ${instanceId} ${instance.state}`);
    state = instance.state;
    fault = instance.error;
    return state === "INSTANCE_STATE_READY";
  });
  if (ready) print(`head ${head}`);
  if (fault) printError(fault.code, fault.message, fault);
  return ready ? 0 : 1;
}

async function generate(instanceId, text) {
  const content = text === "-" ? readFileSync(0, "utf8") : text;
  const client = connect(runner.v1.InstanceService, options.node);
  const request = {
    instance_id: instanceId,
    input: { messages: { messages: [{ role: "user", content }] } },
    max_token_count: Number(options["max-tokens"]),
    sampling: options.seed ? { seed: options.seed } : {},
  };
  const completions = [];
  let count = 0;
  const cancelled = await read(client.Generate(request, metadata(), deadline()), (part) => {
    process.stdout.write(part.text);
    if (part.completion) completions.push(part);
    count += 1;
    return count === Number(options["cancel-after"]);
  });
  print("");
  for (const { choice_index, completion } of completions) {
    print(
      `completion ${choice_index} ${completion.finish_reason}` +
        ` prompt_token_count=${completion.prompt_token_count}` +
        ` completion_token_count=${completion.completion_token_count}`,
    );
  }
  if (cancelled) print(`cancelled after ${count} messages`);
}

// Give each message to `take`; once that returns true, cancel the call and return true.
async function read(stream, take) {
  let enough = false;
  try {
    for await (const message of stream) {
      if (enough) continue;
      enough = take(message);
      if (enough) stream.cancel();
    }
  } catch (error) {
    if (!enough || error.code !== grpc.status.CANCELLED) throw error;
  }
  return enough;
}

async function stop(instanceId) {
  const client = connect(runner.v1.InstanceService, options.node);
  const { instance } = await call(client, "StopInstance", { instance_id: instanceId });
  print(`instance ${instanceId} ${instance.state}`);
}

// Print a failed call's status, with the google.rpc.ErrorInfo and RetryInfo in its details.
function report(error) {
  const [packed] = error.metadata?.get("grpc-status-details-bin") ?? [];
  let info = null;
  let retry = null;
  if (packed) {
    for (const detail of api["google.rpc.Status"].deserialize(packed).details) {
      const kind = detail.type_url.split("/").pop();
      if (kind === "google.rpc.ErrorInfo") info = api[kind].deserialize(detail.value);
      if (kind === "google.rpc.RetryInfo") retry = api[kind].deserialize(detail.value).retry_delay;
    }
  }
  printError(error.code, error.details, info, retry);
}

function printError(code, message, info, retry) {
  const reason = info ? ` ${info.reason}` : "";
  const lines = [`error ${grpc.status[code] ?? code}${reason}: ${message}`];
  for (const [key, value] of Object.entries(info?.metadata ?? {}).sort()) {
    lines.push(`  ${key}=${value}`);
  }
  if (retry) lines.push(`  retry after ${microseconds(retry) / 1000n} ms`);
  process.stderr.write(`${lines.join("\n")}\n`);
}

// Return the command and its arguments, and fill `options`; null when they make no sense.
function parse(words) {
  const positional = [];
  for (let i = 0; i < words.length; i += 1) {
    const name = words[i].slice(2);
    if (!words[i].startsWith("--")) {
      positional.push(words[i]);
    } else {
      const value = words[(i += 1)] ?? "";
      const known = Object.hasOwn(DEFAULTS, name);
      if (!known || !(TEXTS.includes(name) || /^-?\d{1,19}$/.test(value))) return null;
      options[name] = value;
    }
  }
  const [command, ...rest] = positional;
  return Object.hasOwn(COMMANDS, command ?? "") && COMMANDS[command][0] === rest.length
    ? positional
    : null;
}

async function main() {
  const words = parse(process.argv.slice(2));
  if (!words) {
    process.stderr.write(`${USAGE}\n`);
    return 2;
  }
  const [command, ...rest] = words;
  try {
    const status = await COMMANDS[command][1](...rest);
    return typeof status === "number" ? status : 0;
  } catch (error) {
    // What is no failed call is a defect, and is shown as one.
    if (error.metadata === undefined) throw error;
    report(error);
    return 1;
  } finally {
    close();
  }
}

main().then((status) => {
  process.exitCode = status;
});
