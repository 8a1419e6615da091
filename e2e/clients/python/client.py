"""One command line over three Python clients: confluent-kafka (librdkafka), kafka-python, aiokafka.

  client.py LIBRARY produce ...   standard input: one JSON record a line; standard output: one ack a line
  client.py LIBRARY consume ...   standard output: one JSON record a line

A record is {"n": number, "p": partition or null, "t": timestamp, "k": hex or null, "v": hex or null,
"h": [[name, hex or null], ...]}; an ack is {"n", "p", "o"} or {"n", "error"}. The Go and Node
programs beside this one speak the same lines.
"""

import argparse
import asyncio
import json
import sys
import time


def unhex(text):
    return None if text is None else bytes.fromhex(text)


def tohex(data):
    if data is None:
        return None
    return (data.encode() if isinstance(data, str) else bytes(data)).hex()


def headers_in(record):
    return [(name, unhex(value)) for name, value in record.get("h") or []]


def say(**fields):
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def said(partition, offset, timestamp, key, value, headers):
    say(p=partition, o=offset, t=timestamp, k=tohex(key), v=tohex(value),
        h=[[name, tohex(data)] for name, data in headers or []])


def records_in():
    for line in sys.stdin:
        if line.strip():
            yield json.loads(line)


class Budget:
    """Says when a consumer is done: `count` records, or `seconds` gone."""

    def __init__(self, args):
        self.left = args.count
        self.end = time.monotonic() + args.seconds

    def took_one(self):
        self.left -= 1

    def over(self):
        return self.left <= 0 or time.monotonic() > self.end


# --- confluent-kafka ---------------------------------------------------------------------------

def confluent_config(args, extra):
    config = {"bootstrap.servers": args.bootstrap, "client.id": args.client_id}
    config.update(extra)
    config.update(pair.split("=", 1) for pair in args.option)
    return config


def confluent_produce(args):
    from confluent_kafka import Producer
    producer = Producer(confluent_config(args, {
        "acks": args.acks, "compression.type": args.codec, "enable.idempotence": args.idempotent,
        "linger.ms": args.linger, "message.max.bytes": 50_000_000,
        "message.timeout.ms": args.seconds * 1000}))

    def acked(number):
        def report(error, message):
            if error is not None:
                say(n=number, error=str(error))
            else:
                say(n=number, p=message.partition(), o=message.offset())
        return report

    for record in records_in():
        fields = {"key": unhex(record["k"]), "value": unhex(record["v"]), "headers": headers_in(record)}
        if record.get("p") is not None:
            fields["partition"] = record["p"]
        if record.get("t") is not None:
            fields["timestamp"] = record["t"]
        while True:
            try:
                producer.produce(args.topic, on_delivery=acked(record["n"]), **fields)
                break
            except BufferError:
                producer.poll(0.05)
        producer.poll(0)
    producer.flush(args.seconds)


def confluent_consume(args):
    from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
    extra = {"group.id": args.group or "none", "auto.offset.reset": args.reset,
             "isolation.level": args.isolation, "enable.auto.commit": False,
             "enable.partition.eof": True, "session.timeout.ms": args.session}
    if args.instance:
        extra["group.instance.id"] = args.instance
    consumer = Consumer(confluent_config(args, extra))
    if args.group:
        consumer.subscribe([args.topic], on_assign=lambda _, parts: assigned(p.partition for p in parts),
                           on_revoke=lambda _, parts: None)
    else:
        partitions = consumer.list_topics(args.topic, timeout=30).topics[args.topic].partitions
        start = -2 if args.reset == "earliest" else -1
        consumer.assign([TopicPartition(args.topic, p, start) for p in partitions])
        assigned(partitions)
    budget, ended = Budget(args), {}
    while not budget.over():
        message = consumer.poll(0.2)
        if message is None:
            continue
        if message.error():
            if message.error().code() == KafkaError._PARTITION_EOF:
                if args.until_end:
                    ended[message.partition()] = True
                    if len(ended) == len(consumer.assignment()):
                        break
                continue
            say(error=str(message.error()))
            continue
        said(message.partition(), message.offset(), message.timestamp()[1], message.key(),
             message.value(), message.headers())
        budget.took_one()
        if args.commit and args.group:
            try:
                consumer.commit(message, asynchronous=False)
            except KafkaException as error:  # the group went on without it: the record comes again
                say(error=str(error))
    if args.until_end:
        for part in consumer.position(consumer.assignment()):
            low, high = consumer.get_watermark_offsets(part, timeout=30)
            say(end=part.partition, position=part.offset, low=low, high=high)
    consumer.close()


def assigned(partitions):
    say(assigned=sorted(partitions))


# --- kafka-python ------------------------------------------------------------------------------

def kafka_python_produce(args):
    from kafka import KafkaProducer
    acks = "all" if args.acks == "all" else int(args.acks)
    producer = KafkaProducer(
        bootstrap_servers=args.bootstrap, client_id=args.client_id, acks=acks, linger_ms=args.linger,
        compression_type=None if args.codec == "none" else args.codec, max_request_size=50_000_000,
        enable_idempotence=args.idempotent)
    waiting = []
    for record in records_in():
        future = producer.send(args.topic, key=unhex(record["k"]), value=unhex(record["v"]),
                               headers=headers_in(record), partition=record.get("p"),
                               timestamp_ms=record.get("t"))
        waiting.append((record["n"], future))
    producer.flush(args.seconds)
    for number, future in waiting:
        try:
            done = future.get(args.seconds)
            say(n=number, p=done.partition, o=done.offset)
        except Exception as error:  # the caller judges every failure
            say(n=number, error=repr(error))
    producer.close()


def kafka_python_consume(args):
    from kafka import KafkaConsumer, TopicPartition
    consumer = KafkaConsumer(
        bootstrap_servers=args.bootstrap, client_id=args.client_id, group_id=args.group or None,
        auto_offset_reset=args.reset, isolation_level=args.isolation, enable_auto_commit=False,
        session_timeout_ms=args.session)
    if args.group:
        consumer.subscribe([args.topic])
    else:
        consumer.assign([TopicPartition(args.topic, p) for p in consumer.partitions_for_topic(args.topic)])
    budget = Budget(args)
    ends = None
    while not budget.over():
        for batch in consumer.poll(timeout_ms=200).values():
            for record in batch:
                said(record.partition, record.offset, record.timestamp, record.key, record.value,
                     record.headers)
                budget.took_one()
        if args.until_end and consumer.assignment():
            ends = consumer.end_offsets(list(consumer.assignment()))
            if all(consumer.position(part) >= end for part, end in ends.items()):
                break
    if args.commit and args.group:
        consumer.commit()
    if args.until_end:
        for part, end in (ends or {}).items():
            say(end=part.partition, position=consumer.position(part), high=end)
    consumer.close()


def kafka_python_times(args):
    from kafka import KafkaConsumer, TopicPartition
    consumer = KafkaConsumer(bootstrap_servers=args.bootstrap)
    part = TopicPartition(args.topic, 0)
    for when in args.times.split(","):
        found = consumer.offsets_for_times({part: int(when)})[part]
        say(time=int(when), o=None if found is None else found.offset,
            t=None if found is None else found.timestamp)
    consumer.close()


# --- aiokafka ----------------------------------------------------------------------------------

async def aiokafka_produce(args):
    from aiokafka import AIOKafkaProducer
    acks = "all" if args.acks == "all" else int(args.acks)
    producer = AIOKafkaProducer(
        bootstrap_servers=args.bootstrap, client_id=args.client_id, acks=acks, linger_ms=args.linger,
        compression_type=None if args.codec == "none" else args.codec, max_request_size=50_000_000,
        enable_idempotence=args.idempotent)
    await producer.start()
    waiting = []
    for record in records_in():
        future = await producer.send(
            args.topic, key=unhex(record["k"]), value=unhex(record["v"]), headers=headers_in(record),
            partition=record.get("p"), timestamp_ms=record.get("t"))
        waiting.append((record["n"], future))
    for number, future in waiting:
        try:
            done = await asyncio.wait_for(future, args.seconds)
            say(n=number, p=done.partition, o=done.offset)
        except Exception as error:  # the caller judges every failure
            say(n=number, error=repr(error))
    await producer.stop()


async def aiokafka_consume(args):
    from aiokafka import AIOKafkaConsumer
    # Named at once and without a group, it reads every partition of the topic.
    consumer = AIOKafkaConsumer(
        *([] if args.group else [args.topic]), bootstrap_servers=args.bootstrap, client_id=args.client_id, group_id=args.group or None,
        auto_offset_reset=args.reset, isolation_level=args.isolation, enable_auto_commit=False,
        session_timeout_ms=args.session, group_instance_id=args.instance or None)
    if args.group:
        consumer.subscribe([args.topic])
    await consumer.start()
    budget = Budget(args)
    ends = {}
    while not budget.over():
        for batch in (await consumer.getmany(timeout_ms=200)).values():
            for record in batch:
                said(record.partition, record.offset, record.timestamp, record.key, record.value,
                     record.headers)
                budget.took_one()
        if args.until_end and consumer.assignment():
            ends = await consumer.end_offsets(list(consumer.assignment()))
            if all([await consumer.position(part) >= end for part, end in ends.items()]):
                break
    if args.commit and args.group:
        await consumer.commit()
    for part, end in ends.items():
        say(end=part.partition, position=await consumer.position(part), high=end)
    await consumer.stop()


# --- command line ------------------------------------------------------------------------------

ACTIONS = {
    ("confluent", "produce"): confluent_produce,
    ("confluent", "consume"): confluent_consume,
    ("kafka-python", "produce"): kafka_python_produce,
    ("kafka-python", "consume"): kafka_python_consume,
    ("kafka-python", "times"): kafka_python_times,
    ("aiokafka", "produce"): lambda args: asyncio.run(aiokafka_produce(args)),
    ("aiokafka", "consume"): lambda args: asyncio.run(aiokafka_consume(args)),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("action")
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--client-id", default="e2e")
    parser.add_argument("--option", action="append", default=[], help="librdkafka: name=value")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--acks", default="all")
    parser.add_argument("--codec", default="none")
    parser.add_argument("--linger", type=int, default=5)
    parser.add_argument("--idempotent", action="store_true")
    parser.add_argument("--group", default="")
    parser.add_argument("--instance", default="")
    parser.add_argument("--session", type=int, default=10_000)
    parser.add_argument("--count", type=int, default=1 << 40)
    parser.add_argument("--reset", default="earliest")
    parser.add_argument("--isolation", default="read_uncommitted")
    parser.add_argument("--commit", action="store_true")
    parser.add_argument("--until-end", action="store_true")
    parser.add_argument("--times", default="")
    args = parser.parse_args()
    ACTIONS[(args.library, args.action)](args)


if __name__ == "__main__":
    main()
