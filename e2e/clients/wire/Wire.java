// A raw Kafka client that reads requests as JSON and prints answers as JSON, every field, in the form of the Java
// client's own message converters. One line in, one line out:
//   {"to": "HOST:PORT", "api": "METADATA", "version": 12, "body": {...}}
//   {"ok": {...}}, {"closed": "why"} when the connection ended instead of an answer, {"invalid": "why"} when the
//   request or the answer is not what the Java client calls a message
// "raw": HEX instead of "body" sends these bytes as the body. A connection per address and "on" name is kept.
// {"to", "version", "produce": {"topic", "partition", "count", ...}} sends that many records as one batch; see batch().
// {"ranges": true} prints the version range of every API that Kafka's Java client knows.
// Run with Kafka's class path: java -cp ... Wire.java

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.JsonNodeFactory;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.BufferedReader;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.io.InputStreamReader;
import java.lang.reflect.InvocationTargetException;
import java.net.Socket;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import org.apache.kafka.common.compress.Compression;
import org.apache.kafka.common.message.ProduceRequestData;
import org.apache.kafka.common.message.ProduceRequestData.PartitionProduceData;
import org.apache.kafka.common.message.ProduceRequestData.TopicProduceData;
import org.apache.kafka.common.message.ProduceRequestData.TopicProduceDataCollection;
import org.apache.kafka.common.message.RequestHeaderData;
import org.apache.kafka.common.message.ResponseHeaderData;
import org.apache.kafka.common.protocol.ApiKeys;
import org.apache.kafka.common.protocol.ApiMessage;
import org.apache.kafka.common.protocol.ByteBufferAccessor;
import org.apache.kafka.common.protocol.MessageUtil;
import org.apache.kafka.common.record.internal.MemoryRecords;
import org.apache.kafka.common.record.internal.SimpleRecord;

public class Wire {
    private static final int TIMEOUT_MS = 15_000;
    private static final ObjectMapper JSON = new ObjectMapper();

    private final Map<String, Socket> connections = new HashMap<>();
    private int correlation = 0;

    public static void main(String[] args) throws Exception {
        Wire wire = new Wire();
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            System.out.println(wire.answer(JSON.readTree(line)));
        }
    }

    private JsonNode answer(JsonNode request) throws Exception {
        ObjectNode answer = JsonNodeFactory.instance.objectNode();
        if (request.has("ranges")) {
            for (ApiKeys key : ApiKeys.clientApis()) {
                ObjectNode range = answer.putObject(key.messageType.name());
                range.put("key", key.id).put("min", key.oldestVersion()).put("max", key.latestVersion());
            }
            return answer;
        }
        String name = request.get("to").asText() + "/" + request.path("on").asText("");
        try {
            answer.set("ok", ask(name, request));
        } catch (IOException error) {
            Socket socket = connections.remove(name);
            if (socket != null) {
                socket.close();
            }
            answer.put("closed", error.getClass().getSimpleName());
        } catch (RuntimeException error) {
            answer.put("invalid", error.getMessage() + ": " + error.getCause());
        }
        return answer;
    }

    private JsonNode ask(String name, JsonNode request) throws Exception {
        ApiKeys key = ApiKeys.valueOf(request.get("api").asText());
        short version = (short) request.get("version").asInt();
        ByteBuffer body = request.has("raw") ? ByteBuffer.wrap(HexFormat.of().parseHex(request.get("raw").asText()))
            : request.has("produce") ? produce(version, request.get("produce"))
            : body(key, version, request.get("body"));
        Socket socket = connection(name, request.get("to").asText());
        send(socket, key, version, body);
        ByteBuffer frame = receive(socket);
        ByteBufferAccessor readable = new ByteBufferAccessor(frame);
        ResponseHeaderData header = new ResponseHeaderData(readable, responseHeaderVersion(key, version));
        if (header.correlationId() != correlation) {
            throw new IllegalStateException("correlation id " + header.correlationId() + ", not " + correlation);
        }
        short shape = key == ApiKeys.API_VERSIONS && !key.isVersionSupported(version) ? 0 : version;
        ApiMessage response = key.messageType.newResponse();
        response.read(readable, shape);
        if (frame.hasRemaining()) {
            throw new IllegalStateException(frame.remaining() + " bytes behind the answer to " + request);
        }
        return convert(response, "write", JsonNode.class, response.getClass(), response, shape);
    }

    private static ByteBuffer body(ApiKeys key, short version, JsonNode json) throws Exception {
        ApiMessage message = convert(key.messageType.newRequest(), "read", ApiMessage.class, JsonNode.class, json,
            version);
        return MessageUtil.toByteBufferAccessor(message, version).buffer();
    }

    private static ByteBuffer produce(short version, JsonNode json) {
        PartitionProduceData partition = new PartitionProduceData().setIndex(json.path("partition").asInt(0))
            .setRecords(batch(json));
        TopicProduceData topic = new TopicProduceData().setName(json.get("topic").asText())
            .setPartitionData(List.of(partition));
        ProduceRequestData request = new ProduceRequestData().setAcks((short) json.path("acks").asInt(-1))
            .setTimeoutMs(10_000).setTopicData(new TopicProduceDataCollection(List.of(topic).iterator()));
        return MessageUtil.toByteBufferAccessor(request, version).buffer();
    }

    // Records 0.. with keys "k<i>", values "v<i>" (padded to "bytes") and timestamps a second apart.
    private static MemoryRecords batch(JsonNode json) {
        SimpleRecord[] records = new SimpleRecord[json.path("count").asInt(1)];
        long timestamp = json.path("timestamp").asLong(1_700_000_000_000L);
        for (int i = 0; i < records.length; i++) {
            byte[] key = json.path("keyless").asBoolean() ? null : ("k" + i).getBytes(StandardCharsets.UTF_8);
            byte[] value = Arrays.copyOf(("v" + i).getBytes(StandardCharsets.UTF_8), json.path("bytes").asInt(2));
            records[i] = new SimpleRecord(timestamp + 1000L * i, key, value);
        }
        Compression codec = Compression.of(json.path("codec").asText("none")).build();
        long producer = json.path("producerId").asLong(-1);
        MemoryRecords batch = producer < 0 ? MemoryRecords.withRecords(codec, records)
            : MemoryRecords.withIdempotentRecords(codec, producer, (short) json.path("epoch").asInt(0),
                json.path("sequence").asInt(0), records);
        if (json.has("flip")) {
            // One bit of the batch is changed behind its CRC.
            ByteBuffer bytes = batch.buffer();
            int at = json.get("flip").asInt();
            bytes.put(at, (byte) (bytes.get(at) ^ 1));
        }
        return batch;
    }

    private static <T> T convert(ApiMessage of, String method, Class<T> result, Class<?> type, Object value,
            short version) throws Exception {
        Class<?> converter = Class.forName(of.getClass().getName() + "JsonConverter");
        try {
            return result.cast(converter.getMethod(method, type, short.class).invoke(null, value, version));
        } catch (InvocationTargetException error) {
            throw new IllegalArgumentException(of.getClass().getSimpleName() + " " + version + ": " + value,
                error.getCause());
        }
    }

    private Socket connection(String name, String address) throws IOException {
        Socket socket = connections.get(name);
        if (socket == null) {
            int colon = address.lastIndexOf(':');
            socket = new Socket(address.substring(0, colon), Integer.parseInt(address.substring(colon + 1)));
            socket.setTcpNoDelay(true);
            socket.setSoTimeout(TIMEOUT_MS);
            connections.put(name, socket);
        }
        return socket;
    }

    private void send(Socket socket, ApiKeys key, short version, ByteBuffer body) throws IOException {
        correlation++;
        RequestHeaderData header = new RequestHeaderData().setRequestApiKey(key.id).setRequestApiVersion(version)
            .setCorrelationId(correlation).setClientId("wire");
        short headerVersion = key.isVersionSupported(version) ? key.requestHeaderVersion(version) : 1;
        ByteBuffer head = MessageUtil.toByteBufferAccessor(header, headerVersion).buffer();
        byte[] frame = new byte[head.remaining() + body.remaining()];
        int headBytes = head.remaining();
        head.get(frame, 0, headBytes);
        body.get(frame, headBytes, frame.length - headBytes);
        DataOutputStream out = new DataOutputStream(socket.getOutputStream());
        byte[] message = ByteBuffer.allocate(4 + frame.length).putInt(frame.length).put(frame).array();
        out.write(message);
        out.flush();
    }

    private static ByteBuffer receive(Socket socket) throws IOException {
        DataInputStream in = new DataInputStream(socket.getInputStream());
        byte[] frame = new byte[in.readInt()];
        in.readFully(frame);
        return ByteBuffer.wrap(frame);
    }

    private static short responseHeaderVersion(ApiKeys key, short version) {
        return key.isVersionSupported(version) ? key.responseHeaderVersion(version) : 0;
    }
}
