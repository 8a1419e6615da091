// Apache Kafka's own Java client behind the face that every client program of the tests has: JSON lines on standard input
// (records to produce) and standard output (what was acknowledged, assigned, consumed), as python/client.py says them.
// Run with Kafka's class path: java -cp ... Client.java produce|consume --bootstrap HOST:PORT --topic NAME [--group NAME]
// [--count N] [--seconds N] [--commit].

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

public class Client {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final HexFormat HEX = HexFormat.of();

    public static void main(String[] args) throws Exception {
        Map<String, String> options = new HashMap<>();
        for (int at = 1; at < args.length; at++) {
            boolean valued = at + 1 < args.length && !args[at + 1].startsWith("--");
            options.put(args[at].substring(2), valued ? args[++at] : "");
        }
        Properties properties = new Properties();
        properties.put("bootstrap.servers", options.get("bootstrap"));
        properties.put("client.id", "e2e-java");
        if (args[0].equals("produce")) {
            produce(options, properties);
        } else {
            consume(options, properties);
        }
    }

    private static synchronized void say(Map<String, Object> line) {
        try {
            System.out.println(JSON.writeValueAsString(line));
            System.out.flush();
        } catch (Exception error) {
            throw new IllegalStateException(error);
        }
    }

    private static byte[] bytes(JsonNode hex) {
        return hex == null || hex.isNull() ? null : HEX.parseHex(hex.asText());
    }

    private static String hex(byte[] bytes) {
        return bytes == null ? null : HEX.formatHex(bytes);
    }

    private static void produce(Map<String, String> options, Properties properties) throws Exception {
        properties.put("acks", "all");
        properties.put("enable.idempotence", "true");
        properties.put("key.serializer", ByteArraySerializer.class.getName());
        properties.put("value.serializer", ByteArraySerializer.class.getName());
        try (KafkaProducer<byte[], byte[]> producer = new KafkaProducer<>(properties);
                BufferedReader input = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8))) {
            for (String line = input.readLine(); line != null; line = input.readLine()) {
                JsonNode told = JSON.readTree(line);
                Integer partition = told.path("p").isInt() ? told.get("p").asInt() : null;
                ProducerRecord<byte[], byte[]> record =
                    new ProducerRecord<>(options.get("topic"), partition, bytes(told.get("k")), bytes(told.get("v")));
                for (JsonNode header : told.path("h")) {
                    record.headers().add(header.get(0).asText(), bytes(header.get(1)));
                }
                long number = told.get("n").asLong();
                producer.send(record, (done, error) -> {
                    Map<String, Object> said = new LinkedHashMap<>();
                    said.put("n", number);
                    if (error == null) {
                        said.put("p", done.partition());
                        said.put("o", done.offset());
                    } else {
                        said.put("error", error.toString());
                    }
                    say(said);
                });
            }
            producer.flush();
        }
    }

    private static void consume(Map<String, String> options, Properties properties) {
        properties.put("group.id", options.get("group"));
        properties.put("auto.offset.reset", "earliest");
        properties.put("enable.auto.commit", "false");
        properties.put("key.deserializer", ByteArrayDeserializer.class.getName());
        properties.put("value.deserializer", ByteArrayDeserializer.class.getName());
        long left = Long.parseLong(options.getOrDefault("count", "9000000000"));
        long end = System.nanoTime() + Duration.ofSeconds(Long.parseLong(options.getOrDefault("seconds", "60"))).toNanos();
        try (KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(properties)) {
            consumer.subscribe(List.of(options.get("topic")), new ConsumerRebalanceListener() {
                @Override
                public void onPartitionsAssigned(Collection<TopicPartition> partitions) {
                    List<Integer> numbers = new ArrayList<>();
                    consumer.assignment().forEach(partition -> numbers.add(partition.partition()));
                    say(Map.of("assigned", numbers));
                }

                @Override
                public void onPartitionsRevoked(Collection<TopicPartition> partitions) {}
            });
            while (left > 0 && System.nanoTime() < end) {
                for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(200))) {
                    say(said(record));
                    left--;
                }
                if (options.containsKey("commit")) {
                    consumer.commitSync();
                }
            }
        }
    }

    private static Map<String, Object> said(ConsumerRecord<byte[], byte[]> record) {
        Map<String, Object> said = new LinkedHashMap<>();
        said.put("p", record.partition());
        said.put("o", record.offset());
        said.put("t", record.timestamp());
        said.put("k", hex(record.key()));
        said.put("v", hex(record.value()));
        List<List<String>> headers = new ArrayList<>();
        for (Header header : record.headers()) {
            List<String> pair = new ArrayList<>();
            pair.add(header.key());
            pair.add(hex(header.value()));
            headers.add(pair);
        }
        said.put("h", headers);
        return said;
    }
}
