// SPDX-License-Identifier: Apache-2.0
import java.lang.reflect.Proxy;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Random;
import java.util.stream.Collectors;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.coordinator.common.runtime.CoordinatorMetadataImage;
import org.apache.kafka.coordinator.group.Utils;

/**
 * Prints what Kafka's own class computes for made-up topics and groups, as the JSON of tests/unit/group/kafka_topic_hashes.json. The numbers are
 * drawn from a fixed seed, so every run prints the same.
 */
public class TopicHashes {
    record Topic(String name, Uuid id, List<List<String>> racks) implements CoordinatorMetadataImage.TopicMetadata {
        @Override
        public int partitionCount() {
            return racks.size();
        }

        @Override
        public List<String> partitionRacks(int partition) {
            return new ArrayList<>(racks.get(partition));
        }
    }

    static long hash(Topic topic) {
        ClassLoader loader = TopicHashes.class.getClassLoader();
        Object image = Proxy.newProxyInstance(loader, new Class<?>[] {CoordinatorMetadataImage.class}, (proxy, method, arguments) -> {
            if (method.getName().equals("topicMetadata") && topic.name.equals(arguments[0])) {
                return Optional.of(topic);
            }
            throw new UnsupportedOperationException(method.getName());
        });
        return Utils.computeTopicHash(topic.name, (CoordinatorMetadataImage) image);
    }

    static String quoted(String text) {
        return "\"" + text + "\"";
    }

    static String listed(List<?> values) {
        return values.stream().map(Object::toString).collect(Collectors.joining(", ", "[", "]"));
    }

    static String json(Topic topic) {
        String id = String.format("%016x%016x", topic.id.getMostSignificantBits(), topic.id.getLeastSignificantBits());
        String racks = listed(topic.racks.stream().map(some -> listed(some.stream().map(TopicHashes::quoted).toList())).toList());
        return "{\"name\": " + quoted(topic.name) + ", \"id\": " + quoted(id) + ", \"racks\": " + racks + ", \"hash\": " + hash(topic) + "}";
    }

    static String json(Map<String, Long> group) {
        String hashes = group.entrySet().stream().sorted(Map.Entry.comparingByKey()).map(entry -> quoted(entry.getKey()) + ": " + entry.getValue())
            .collect(Collectors.joining(", ", "{", "}"));
        return "{\"topics\": " + hashes + ", \"hash\": " + Utils.computeGroupHash(group) + "}";
    }

    public static void main(String[] args) {
        Random random = new Random(848);
        String[][] rackSets = {
            {}, {"rack-a"}, {"eu-west-1a", "eu-west-1b", "eu-west-1c"}, {"", "r", "r"}, {"\u00fcber", "\u6771\u4eac", "\uD83D\uDE80x", "\uFF5Ez"}
        };
        String[] names = {"a", "orders", "t6", "payments.v1_x-y", "x".repeat(249)};
        int[] counts = {0, 1, 6, 20, 70};
        List<Topic> topics = new ArrayList<>();
        for (int set = 0; set < rackSets.length; set++) {
            for (int name = 0; name < names.length; name++) {
                List<List<String>> racks = new ArrayList<>();
                for (int partition = 0; partition < counts[(set + name) % counts.length]; partition++) {
                    List<String> some = new ArrayList<>();
                    int replicas = rackSets[set].length == 0 ? 0 : random.nextInt(4);
                    for (int replica = 0; replica < replicas; replica++) {
                        some.add(rackSets[set][random.nextInt(rackSets[set].length)]);
                    }
                    racks.add(some);
                }
                topics.add(new Topic(names[name], new Uuid(random.nextLong(), random.nextLong()), racks));
            }
        }
        List<String> groups = new ArrayList<>();
        for (int count : new int[] {0, 1, 2, 3, 7, 40}) {
            Map<String, Long> group = new HashMap<>();
            while (group.size() < count) {
                group.put("topic-" + random.nextInt(1000), random.nextLong());
            }
            groups.add(json(group));
        }
        String text = "{\"topics\": [\n" + topics.stream().map(TopicHashes::json).collect(Collectors.joining(",\n"))
            + "\n], \"groups\": [\n" + String.join(",\n", groups) + "\n]}\n";
        System.out.writeBytes(text.getBytes(StandardCharsets.UTF_8));
        System.out.flush();
    }
}
