// SPDX-License-Identifier: Apache-2.0
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.time.Duration;
import java.util.Collection;
import java.util.List;
import java.util.Properties;
import java.util.TreeSet;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.stream.Collectors;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.TopicPartition;

/**
 * A member of a KIP-848 group for tests: GroupMember BOOTSTRAP GROUP TOPIC. It commits whatever it polls, leaves when its standard input ends,
 * and prints one line per event: `owns 0,1,2`, `seen N` (records in all, each committed), `closed`.
 */
public class GroupMember {
    public static void main(String[] args) throws Exception {
        Properties config = new Properties();
        config.put("bootstrap.servers", args[0]);
        config.put("group.id", args[1]);
        config.put("group.protocol", "consumer");
        config.put("auto.offset.reset", "earliest");
        config.put("enable.auto.commit", "false");
        config.put("key.deserializer", "org.apache.kafka.common.serialization.ByteArrayDeserializer");
        config.put("value.deserializer", "org.apache.kafka.common.serialization.ByteArrayDeserializer");
        AtomicBoolean ending = new AtomicBoolean();
        Thread input = new Thread(() -> {
            try (BufferedReader reader = new BufferedReader(new InputStreamReader(System.in))) {
                while (reader.readLine() != null) { }
            } catch (Exception ended) {
                System.err.println(ended);
            }
            ending.set(true);
        });
        input.setDaemon(true);
        input.start();
        long seen = 0;
        try (KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(config)) {
            consumer.subscribe(List.of(args[2]), new ConsumerRebalanceListener() {
                private void owns(Collection<TopicPartition> without) {
                    TreeSet<Integer> owned = consumer.assignment().stream().filter(each -> !without.contains(each))
                        .map(TopicPartition::partition).collect(Collectors.toCollection(TreeSet::new));
                    System.out.println("owns " + owned.stream().map(String::valueOf).collect(Collectors.joining(",")));
                }

                public void onPartitionsRevoked(Collection<TopicPartition> partitions) {
                    owns(partitions);
                }

                public void onPartitionsAssigned(Collection<TopicPartition> partitions) {
                    owns(List.of());
                }
            });
            while (!ending.get()) {
                ConsumerRecords<byte[], byte[]> records = consumer.poll(Duration.ofMillis(100));
                if (!records.isEmpty()) {
                    consumer.commitSync();
                    seen += records.count();
                    System.out.println("seen " + seen);
                }
            }
        }
        System.out.println("closed");
    }
}
