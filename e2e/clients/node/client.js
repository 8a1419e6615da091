// kafkajs on the command line, with the same options and lines as python/client.py.
//
// Only what the scenarios use: produce (codecs none, gzip, snappy) and consume in a group. kafkajs
// cannot read without a group, and knows neither lz4 nor zstd by itself.
'use strict';

const readline = require('node:readline');
const { parseArgs } = require('node:util');
const { Kafka, CompressionTypes, CompressionCodecs, logLevel } = require('kafkajs');
CompressionCodecs[CompressionTypes.Snappy] = require('kafkajs-snappy');

const { positionals: [action], values: args } = parseArgs({
  allowPositionals: true,
  options: {
    bootstrap: { type: 'string' }, topic: { type: 'string' },
    'client-id': { type: 'string', default: 'e2e' }, seconds: { type: 'string', default: '60' },
    acks: { type: 'string', default: 'all' }, codec: { type: 'string', default: 'none' },
    linger: { type: 'string', default: '5' }, idempotent: { type: 'boolean', default: false },
    group: { type: 'string', default: 'kafkajs' }, session: { type: 'string', default: '10000' },
    count: { type: 'string', default: '1000000000' }, reset: { type: 'string', default: 'earliest' },
    isolation: { type: 'string', default: 'read_uncommitted' }, commit: { type: 'boolean', default: false },
    'until-end': { type: 'boolean', default: false },
  },
});

const say = (line) => process.stdout.write(JSON.stringify(line) + '\n');
const unhex = (text) => (text === null || text === undefined ? null : Buffer.from(text, 'hex'));
const tohex = (data) => (data === null || data === undefined ? null : Buffer.from(data).toString('hex'));
const kafka = new Kafka({
  brokers: [args.bootstrap], clientId: args['client-id'], logLevel: logLevel.ERROR,
  logCreator: () => ({ log }) => process.stderr.write(JSON.stringify(log) + '\n'),
});

// kafkajs takes headers as an object: a repeated name becomes a list under that name.
function headersIn(list) {
  const headers = {};
  for (const [name, value] of list || []) {
    const data = unhex(value);
    headers[name] = name in headers ? [].concat(headers[name], data) : data;
  }
  return headers;
}

function headersOut(headers) {
  const list = [];
  for (const [name, value] of Object.entries(headers || {})) {
    for (const one of Array.isArray(value) ? value : [value]) list.push([name, tohex(one)]);
  }
  return list;
}

async function produce() {
  const producer = kafka.producer({ idempotent: args.idempotent, allowAutoTopicCreation: true });
  await producer.connect();
  const compression = { none: CompressionTypes.None, gzip: CompressionTypes.GZIP, snappy: CompressionTypes.Snappy }[args.codec];
  const send = async (batch) => {
    const messages = batch.map((r) => ({
      key: unhex(r.k), value: unhex(r.v), headers: headersIn(r.h),
      ...(r.p === null || r.p === undefined ? {} : { partition: r.p }),
      ...(r.t === null || r.t === undefined ? {} : { timestamp: String(r.t) }),
    }));
    const acks = args.acks === 'all' ? -1 : Number(args.acks);
    const done = await producer.send({ topic: args.topic, messages, compression, acks });
    // One base offset a partition comes back; which record went where is known only for explicit partitions.
    const next = {};
    for (const d of done) next[d.partition] = Number(d.baseOffset);
    for (const r of batch) {
      const p = r.p ?? done[0].partition;
      say({ n: r.n, p, o: next[p]++ });
    }
  };
  let batch = [];
  for await (const line of readline.createInterface({ input: process.stdin })) {
    if (!line.trim()) continue;
    batch.push(JSON.parse(line));
    if (batch.length === 500) { await send(batch); batch = []; }
  }
  if (batch.length) await send(batch);
  await producer.disconnect();
}

async function consume() {
  const consumer = kafka.consumer({
    groupId: args.group, sessionTimeout: Number(args.session),
    readUncommitted: args.isolation === 'read_uncommitted', maxWaitTimeInMs: 500,
  });
  let left = Number(args.count);
  let finish;
  const done = new Promise((resolve) => { finish = resolve; });
  setTimeout(finish, Number(args.seconds) * 1000).unref();
  consumer.on(consumer.events.GROUP_JOIN, ({ payload }) => {
    say({ assigned: (payload.memberAssignment[args.topic] || []).slice().sort() });
  });
  const reached = {};
  await consumer.connect();
  await consumer.subscribe({ topic: args.topic, fromBeginning: args.reset === 'earliest' });
  await consumer.run({
    autoCommit: args.commit, autoCommitThreshold: 1,
    eachBatch: async ({ batch, resolveOffset, heartbeat, commitOffsetsIfNecessary }) => {
      for (const m of batch.messages) {
        say({ p: batch.partition, o: Number(m.offset), t: Number(m.timestamp), k: tohex(m.key), v: tohex(m.value), h: headersOut(m.headers) });
        resolveOffset(m.offset);
        left -= 1;
      }
      await commitOffsetsIfNecessary();
      await heartbeat();
      reached[batch.partition] = { end: batch.partition, position: Number(batch.lastOffset()) + 1, high: Number(batch.highWatermark) };
      if (left <= 0) finish();
      if (args['until-end'] && Object.values(reached).every((r) => r.position >= r.high)) finish();
    },
  });
  await done;
  if (args['until-end']) Object.values(reached).forEach(say);
  await consumer.disconnect();
}

({ produce, consume }[action])().then(() => process.exit(0), (error) => {
  process.stderr.write(String(error.stack || error) + '\n');
  process.exit(1);
});
