/* A load generator on librdkafka, for the benchmarks: as fast as the library goes, no work per record of our own.
 *
 *   perf produce BROKERS TOPIC RECORDS BYTES CODEC ACKS LANES PER_MILLE
 *   perf consume BROKERS TOPIC RECORDS [GROUP]
 *   perf latency BROKERS TOPIC RECORDS BYTES PER_SECOND
 *
 * produce: the library's defaults (linger 5 ms); PER_MILLE of the records carry the header x-lane, spread over LANES
 * lanes. consume: assigns every partition from its beginning, or joins GROUP. latency: sends at a fixed rate without
 * linger; measures from the moment a record was due to its acknowledgement, and to its arrival at a consumer.
 * Prints one line of JSON. Times out when nothing moves for 30 s.
 */
#include <inttypes.h>
#include <librdkafka/rdkafka.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define STALL_US (30 * 1000000LL)

static int64_t acked, failed;
static int64_t *ack_us, *due_us;

static int64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

static void fail(const char *what, const char *why) {
    fprintf(stderr, "%s: %s\n", what, why);
    exit(1);
}

static void set(rd_kafka_conf_t *conf, const char *name, const char *value) {
    char why[512];
    if (rd_kafka_conf_set(conf, name, value, why, sizeof why) != RD_KAFKA_CONF_OK) fail(name, why);
}

static void on_delivery(rd_kafka_t *rk, const rd_kafka_message_t *message, void *opaque) {
    (void)rk, (void)opaque;
    if (message->err) {
        if (failed++ == 0) fprintf(stderr, "first failure: %s\n", rd_kafka_err2str(message->err));
        return;
    }
    acked++;
    if (ack_us) {
        int64_t index = (int64_t)(intptr_t)message->_private;
        ack_us[index] = now_us() - due_us[index];
    }
}

static rd_kafka_t *client(rd_kafka_type_t type, rd_kafka_conf_t *conf) {
    char why[512];
    rd_kafka_t *rk = rd_kafka_new(type, conf, why, sizeof why);
    if (!rk) fail("rd_kafka_new", why);
    return rk;
}

static rd_kafka_conf_t *producer_conf(const char *brokers) {
    rd_kafka_conf_t *conf = rd_kafka_conf_new();
    set(conf, "bootstrap.servers", brokers);
    set(conf, "queue.buffering.max.messages", "500000");
    set(conf, "queue.buffering.max.kbytes", "524288");
    rd_kafka_conf_set_dr_msg_cb(conf, on_delivery);
    return conf;
}

/* Capital letters, which pack to 60 %, or bytes that do not pack at all. */
static char *payload(size_t bytes, int letters) {
    char *text = malloc(bytes + 1);
    uint32_t random = 1;
    for (size_t i = 0; i < bytes; i++) {
        random = random * 1664525u + 1013904223u;
        text[i] = letters ? 'A' + (random >> 16) % 26 : (char)(random >> 24);
    }
    return text;
}

/* Learns the leaders, so that this is not part of what is measured; how many partitions there are. */
static int connect_to(rd_kafka_t *rk, const char *topic) {
    rd_kafka_topic_t *handle = rd_kafka_topic_new(rk, topic, NULL);
    for (int64_t end = now_us() + STALL_US; now_us() < end;) {
        const struct rd_kafka_metadata *metadata;
        rd_kafka_resp_err_t error = rd_kafka_metadata(rk, 0, handle, &metadata, 10000);
        if (error) fail("metadata", rd_kafka_err2str(error));
        int partitions = metadata->topics[0].err ? 0 : metadata->topics[0].partition_cnt;
        rd_kafka_metadata_destroy(metadata);
        if (partitions > 0) return partitions;
        struct timespec nap = {0, 50 * 1000000};
        nanosleep(&nap, NULL);
    }
    fail("no such topic", topic);
    return 0;
}

/* A record is a window into a larger text; large enough that no two records of one batch overlap. */
#define TEXT_BYTES (16 << 20)

static void send_one(rd_kafka_t *rk, const char *topic, const char *value, size_t bytes, const char *lane, int64_t index) {
    for (;;) {
        rd_kafka_resp_err_t error;
        void *opaque = (void *)(intptr_t)index;
        if (lane)
            error = rd_kafka_producev(rk, RD_KAFKA_V_TOPIC(topic), RD_KAFKA_V_VALUE((void *)value, bytes),
                                      RD_KAFKA_V_HEADER("x-lane", lane, -1), RD_KAFKA_V_OPAQUE(opaque), RD_KAFKA_V_END);
        else
            error = rd_kafka_producev(rk, RD_KAFKA_V_TOPIC(topic), RD_KAFKA_V_VALUE((void *)value, bytes),
                                      RD_KAFKA_V_OPAQUE(opaque), RD_KAFKA_V_END);
        if (!error) return;
        if (error != RD_KAFKA_RESP_ERR__QUEUE_FULL) fail("produce", rd_kafka_err2str(error));
        rd_kafka_poll(rk, 10);
    }
}

static void wait_acks(rd_kafka_t *rk, int64_t records) {
    int64_t seen = -1, moved = now_us();
    while (acked + failed < records) {
        rd_kafka_poll(rk, 10);
        if (acked != seen) seen = acked, moved = now_us();
        if (now_us() - moved > STALL_US) fail("produce", "no acknowledgement for 30 s");
    }
    if (failed) fail("produce", "records failed");
}

static void produce(char **arg) {
    const char *topic = arg[1];
    int64_t records = atoll(arg[2]);
    size_t bytes = (size_t)atoll(arg[3]);
    int lanes = atoi(arg[6]), per_mille = atoi(arg[7]);
    rd_kafka_conf_t *conf = producer_conf(arg[0]);
    set(conf, "compression.codec", arg[4]);
    set(conf, "request.required.acks", arg[5]);
    rd_kafka_t *rk = client(RD_KAFKA_PRODUCER, conf);
    /* What a client leaves plain must not shrink where somebody else packs it. */
    char *text = payload(TEXT_BYTES + bytes, strcmp(arg[4], "none"));
    connect_to(rk, topic);
    int64_t begin = now_us();
    int64_t lane_records = 0;
    for (int64_t i = 0; i < records; i++) {
        char lane[32];
        int in_lane = i * per_mille / 1000 != (i + 1) * per_mille / 1000;
        if (in_lane) snprintf(lane, sizeof lane, "boe-%d", (int)(lane_records++ % lanes));
        send_one(rk, topic, text + (i * 4099) % TEXT_BYTES, bytes, in_lane ? lane : NULL, i);
        if (i % 1000 == 0) rd_kafka_poll(rk, 0);
    }
    wait_acks(rk, records);
    double seconds = (now_us() - begin) / 1e6;
    printf("{\"records\": %" PRId64 ", \"seconds\": %.6f, \"lane_records\": %" PRId64 "}\n", acked, seconds, lane_records);
}

static rd_kafka_t *consumer(const char *brokers, const char *topic, const char *group) {
    rd_kafka_conf_t *conf = rd_kafka_conf_new();
    set(conf, "bootstrap.servers", brokers);
    set(conf, "group.id", group ? group : "perf");
    set(conf, "enable.auto.commit", group ? "true" : "false");
    set(conf, "auto.offset.reset", "earliest");
    rd_kafka_t *rk = client(RD_KAFKA_CONSUMER, conf);
    rd_kafka_poll_set_consumer(rk);
    rd_kafka_topic_partition_list_t *list = rd_kafka_topic_partition_list_new(1);
    if (group) {
        rd_kafka_topic_partition_list_add(list, topic, RD_KAFKA_PARTITION_UA);
        if (rd_kafka_subscribe(rk, list)) fail("subscribe", topic);
    } else {
        int partitions = connect_to(rk, topic);
        for (int i = 0; i < partitions; i++)
            rd_kafka_topic_partition_list_add(list, topic, i)->offset = RD_KAFKA_OFFSET_BEGINNING;
        if (rd_kafka_assign(rk, list)) fail("assign", topic);
    }
    rd_kafka_topic_partition_list_destroy(list);
    return rk;
}

static void consume(char **arg, int args) {
    int64_t records = atoll(arg[2]), seen = 0, bytes = 0;
    int64_t begin = now_us(), first = 0, moved = begin;
    rd_kafka_t *rk = consumer(arg[0], arg[1], args > 3 ? arg[3] : NULL);
    while (seen < records) {
        rd_kafka_message_t *message = rd_kafka_consumer_poll(rk, 100);
        if (now_us() - moved > STALL_US) fail("consume", "no record for 30 s");
        if (!message) continue;
        if (!message->err) {
            if (!first) first = now_us();
            seen++;
            bytes += (int64_t)message->len;
            moved = now_us();
        }
        rd_kafka_message_destroy(message);
    }
    int64_t end = now_us();
    printf("{\"records\": %" PRId64 ", \"bytes\": %" PRId64 ", \"seconds\": %.6f, \"first\": %.6f}\n", seen, bytes,
           (end - begin) / 1e6, (first - begin) / 1e6);
}

static int64_t *arrived_us;
static int64_t arrived, expected;

static void *receive(void *opaque) {
    rd_kafka_t *rk = opaque;
    int64_t moved = now_us();
    while (arrived < expected) {
        rd_kafka_message_t *message = rd_kafka_consumer_poll(rk, 100);
        if (now_us() - moved > STALL_US) fail("latency", "no record for 30 s");
        if (!message) continue;
        if (!message->err && message->len >= sizeof(int64_t)) {
            int64_t index;
            memcpy(&index, message->payload, sizeof index);
            /* Records of the warm-up carry a negative index. */
            if (index >= 0 && index < expected) arrived_us[index] = now_us() - due_us[index], arrived++;
            moved = now_us();
        }
        rd_kafka_message_destroy(message);
    }
    return NULL;
}

static int by_value(const void *left, const void *right) {
    int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return (a > b) - (a < b);
}

static void percentiles(const char *name, int64_t *values, int64_t count, const char *end) {
    qsort(values, (size_t)count, sizeof *values, by_value);
    printf("\"%s\": {\"p50\": %" PRId64 ", \"p99\": %" PRId64 ", \"p999\": %" PRId64 "}%s", name, values[count / 2],
           values[count * 99 / 100], values[count * 999 / 1000], end);
}

static void wait_until(rd_kafka_t *rk, int64_t due) {
    for (int64_t left = due - now_us(); left > 0; left = due - now_us()) {
        rd_kafka_poll(rk, 0);
        struct timespec nap = {0, (left > 200 ? 200 : left) * 1000};
        nanosleep(&nap, NULL);
    }
}

/* Acknowledgements come in at poll; a thread polls all the time so that waiting does not count as latency. */
static volatile int polling = 1;

static void *poll_all(void *rk) {
    while (polling) rd_kafka_poll(rk, 10);
    return NULL;
}

static void latency(char **arg) {
    const char *topic = arg[1];
    expected = atoll(arg[2]);
    size_t bytes = (size_t)atoll(arg[3]);
    int64_t rate = atoll(arg[4]), warm_up = rate;
    rd_kafka_conf_t *conf = producer_conf(arg[0]);
    set(conf, "linger.ms", "0");
    set(conf, "request.required.acks", "all");
    rd_kafka_t *rk = client(RD_KAFKA_PRODUCER, conf);
    size_t slots = (size_t)(expected + warm_up);
    due_us = calloc(slots, sizeof *due_us);
    ack_us = calloc(slots, sizeof *ack_us);
    arrived_us = calloc((size_t)expected, sizeof *arrived_us);
    connect_to(rk, topic);
    rd_kafka_t *reader = consumer(arg[0], topic, NULL);
    pthread_t receiver, poller;
    pthread_create(&receiver, NULL, receive, reader);
    pthread_create(&poller, NULL, poll_all, rk);
    char *value = payload(bytes, 0);
    int64_t begin = now_us() + 100000;
    for (int64_t i = 0; i < expected + warm_up; i++) {
        /* Slots behind the measured ones belong to the warm-up, which comes first. */
        int64_t slot = i < warm_up ? expected + i : i - warm_up;
        int64_t index = i < warm_up ? -1 : slot;
        due_us[slot] = begin + i * 1000000 / rate;
        wait_until(rk, due_us[slot]);
        memcpy(value, &index, sizeof index);
        for (;;) {
            rd_kafka_resp_err_t error = rd_kafka_producev(
                rk, RD_KAFKA_V_TOPIC(topic), RD_KAFKA_V_VALUE(value, bytes), RD_KAFKA_V_MSGFLAGS(RD_KAFKA_MSG_F_COPY),
                RD_KAFKA_V_OPAQUE((void *)(intptr_t)slot), RD_KAFKA_V_END);
            if (!error) break;
            if (error != RD_KAFKA_RESP_ERR__QUEUE_FULL) fail("produce", rd_kafka_err2str(error));
        }
    }
    pthread_join(receiver, NULL);
    polling = 0;
    pthread_join(poller, NULL);
    wait_acks(rk, expected + warm_up);
    printf("{\"records\": %" PRId64 ", ", expected);
    percentiles("ack_us", ack_us, expected, ", ");
    percentiles("arrival_us", arrived_us, expected, "}\n");
}

int main(int args, char **arg) {
    if (args >= 10 && !strcmp(arg[1], "produce")) produce(arg + 2);
    else if (args >= 5 && !strcmp(arg[1], "consume")) consume(arg + 2, args - 2);
    else if (args >= 7 && !strcmp(arg[1], "latency")) latency(arg + 2);
    else fail("usage", "see the head of perf.c");
    fflush(stdout);
    /* Everything is acknowledged or read: there is nothing to close in order. */
    _exit(0);
}
