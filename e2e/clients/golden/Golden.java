// Writes golden bytes for Kafka's request and response bodies, every version, as Kafka's own Java client encodes
// them. Bodies are filled by walking the protocol schema, so every field of a version carries a value; each body
// is then read and written again by the client's generated classes, which must give the same bytes.
// Error codes are real ones. A Fetch response says only what a broker without replicas can say: no preferred
// replica, no snapshot id, no null records.
// One file per message: lines of version, variant, body in hex, body as JSON (Produce and Fetch only).
// Run with Kafka's class path: java -cp ... Golden.java DIRECTORY

import com.fasterxml.jackson.databind.JsonNode;
import java.lang.reflect.Method;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.compress.Compression;
import org.apache.kafka.common.header.internals.RecordHeader;
import org.apache.kafka.common.protocol.ApiKeys;
import org.apache.kafka.common.protocol.ApiMessage;
import org.apache.kafka.common.protocol.ByteBufferAccessor;
import org.apache.kafka.common.protocol.MessageUtil;
import org.apache.kafka.common.protocol.types.BoundField;
import org.apache.kafka.common.protocol.types.Field;
import org.apache.kafka.common.protocol.types.Schema;
import org.apache.kafka.common.protocol.types.Struct;
import org.apache.kafka.common.protocol.types.TaggedFields;
import org.apache.kafka.common.protocol.types.Type;
import org.apache.kafka.common.record.internal.MemoryRecords;
import org.apache.kafka.common.record.internal.SimpleRecord;

public class Golden {
    // full: arrays of two, everything set; null: what may be null is; empty: arrays, strings and bytes are empty.
    private enum Variant { FULL, NULL, EMPTY }

    private static final Set<ApiKeys> WITH_JSON = Set.of(ApiKeys.PRODUCE, ApiKeys.FETCH);
    private static final Set<Integer> KEYS = Set.of(
        0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 28, 29, 30, 31, 32, 33,
        35, 36, 37, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 60, 61, 65, 66, 68, 69, 74, 75);

    private final Variant variant;
    private final boolean isFetchResponse;
    private long count = 0;

    private Golden(Variant variant, boolean isFetchResponse) {
        this.variant = variant;
        this.isFetchResponse = isFetchResponse;
    }

    public static void main(String[] args) throws Exception {
        Path directory = Path.of(args[0]);
        Files.createDirectories(directory);
        for (ApiKeys key : ApiKeys.values()) {
            if (!KEYS.contains((int) key.id)) {
                continue;
            }
            write(directory, key, "request", key.messageType.requestSchemas(), key.messageType.newRequest().getClass());
            write(directory, key, "response", key.messageType.responseSchemas(),
                key.messageType.newResponse().getClass());
        }
    }

    private static void write(Path directory, ApiKeys key, String kind, Schema[] schemas, Class<?> message)
            throws Exception {
        StringBuilder text = new StringBuilder();
        for (short version : key.allVersions()) {
            String before = "";
            for (Variant variant : Variant.values()) {
                ByteBuffer body = new Golden(variant, key == ApiKeys.FETCH && kind.equals("response")).body(schemas[version]);
                ApiMessage read = check(message, body, version);
                String hex = HexFormat.of().formatHex(body.array());
                if (before.contains(hex + "\n")) {
                    continue;
                }
                before += hex + "\n";
                text.append(version).append('\t').append(variant.name().toLowerCase()).append('\t').append(hex);
                if (WITH_JSON.contains(key)) {
                    text.append('\t').append(json(read, version));
                }
                text.append('\n');
            }
        }
        String name = String.format("%02d-%s.%s.tsv", key.id, key.messageType.name().toLowerCase(), kind);
        Files.writeString(directory.resolve(name), text);
    }

    private static ApiMessage check(Class<?> message, ByteBuffer body, short version) throws Exception {
        ApiMessage read = (ApiMessage) message.getConstructor().newInstance();
        read.read(new ByteBufferAccessor(body.duplicate()), version);
        byte[] again = bytes(MessageUtil.toByteBufferAccessor(read, version).buffer());
        if (!java.util.Arrays.equals(again, body.array())) {
            throw new IllegalStateException(message.getSimpleName() + " " + version + " is written as\n"
                + HexFormat.of().formatHex(again) + "\nnot\n" + HexFormat.of().formatHex(body.array()) + "\n" + read);
        }
        return read;
    }

    private static byte[] bytes(ByteBuffer buffer) {
        byte[] bytes = new byte[buffer.remaining()];
        buffer.get(bytes);
        return bytes;
    }

    // Records appear in the JSON by their size only; the bytes are in the hex column.
    private static JsonNode json(ApiMessage message, short version) throws Exception {
        Class<?> converter = Class.forName(message.getClass().getName() + "JsonConverter");
        Method write = converter.getMethod("write", message.getClass(), short.class, boolean.class);
        return (JsonNode) write.invoke(null, message, version, false);
    }

    private ByteBuffer body(Schema schema) {
        Struct struct = struct(schema);
        ByteBuffer buffer = ByteBuffer.allocate(schema.sizeOf(struct));
        schema.write(buffer, struct);
        buffer.flip();
        return buffer;
    }

    private Struct struct(Schema schema) {
        Struct struct = new Struct(schema);
        for (BoundField field : schema.fields()) {
            struct.set(field, value(field.def.name, field.def.type));
        }
        return struct;
    }

    private Object value(String name, Type type) {
        if (type instanceof TaggedFields tagged) {
            return tags(tagged);
        }
        if (name.equals("preferred_read_replica")) {
            return -1;
        }
        if (name.equals("error_code")) {
            return (short) (count++ % 57);
        }
        if (name.equals("records") && isFetchResponse && variant == Variant.NULL) {
            return MemoryRecords.EMPTY;
        }
        if (variant == Variant.NULL && type.isNullable()) {
            return null;
        }
        if (type.isArray()) {
            List<Object> elements = new ArrayList<>();
            for (int i = 0; i < (variant == Variant.EMPTY ? 0 : 2); i++) {
                elements.add(value(name, type.arrayElementType().orElseThrow()));
            }
            return elements.toArray();
        }
        if (type instanceof Schema schema) {
            return struct(schema);
        }
        count++;
        // NullableSchema reports "Struct" too and is handled above.
        return switch (type.toString()) {
            case "BOOLEAN" -> true;
            case "INT8" -> (byte) count;
            case "INT16" -> (short) (1000 + count);
            case "UINT16" -> (int) (40_000 + count);
            case "INT32" -> (int) (100_000 + count);
            case "UINT32", "UNSIGNED_INT32" -> 3_000_000_000L + count;
            case "INT64" -> 5_000_000_000L + count;
            case "FLOAT64" -> 0.5 + count;
            case "UUID" -> new Uuid(0x0123456789abcdefL, count);
            case "STRING", "COMPACT_STRING", "NULLABLE_STRING", "COMPACT_NULLABLE_STRING" ->
                variant == Variant.EMPTY ? "" : name.replace("_", "-") + "-" + count;
            case "BYTES", "COMPACT_BYTES", "NULLABLE_BYTES", "COMPACT_NULLABLE_BYTES" ->
                ByteBuffer.wrap(variant == Variant.EMPTY ? new byte[0] : ("bytes-" + count).getBytes(StandardCharsets.UTF_8));
            case "RECORDS", "COMPACT_RECORDS", "NULLABLE_RECORDS", "COMPACT_NULLABLE_RECORDS" ->
                variant == Variant.EMPTY ? MemoryRecords.EMPTY : records();
            default -> throw new IllegalStateException("no value for " + type);
        };
    }

    private Map<Integer, Object> tags(TaggedFields tagged) {
        Map<Integer, Object> values = new TreeMap<>();
        if (variant == Variant.FULL) {
            for (Map.Entry<Integer, Field> entry : tagged.fields().entrySet()) {
                if (entry.getValue().name.equals("snapshot_id")) {
                    continue;
                }
                values.put(entry.getKey(), value(entry.getValue().name, entry.getValue().type));
            }
        }
        return values;
    }

    private static MemoryRecords records() {
        byte[] key = "key".getBytes(StandardCharsets.UTF_8);
        byte[] value = "value".getBytes(StandardCharsets.UTF_8);
        RecordHeader[] headers = {new RecordHeader("h", value), new RecordHeader("h", null)};
        return MemoryRecords.withRecords(Compression.NONE,
            new SimpleRecord(1_700_000_000_000L, key, value, headers), new SimpleRecord(1_700_000_000_001L, (byte[]) null, null));
    }
}
