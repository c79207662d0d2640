// SPDX-License-Identifier: Apache-2.0
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;

/**
 * Copies a topic exactly once, until it is killed: consume, produce and commit the offsets in one transaction. Usage:
 * CopyApplication ADDRESS SOURCE TARGET GROUP TRANSACTIONAL_ID PROTOCOL SETTING... It prints a line for each transaction
 * that was committed, and for each failure.
 */
public class CopyApplication {
    public static void main(String[] args) throws InterruptedException {
        while (true) {
            try {
                copy(args);
            } catch (KafkaException | IllegalStateException error) {
                System.out.println("restart " + error);
                Thread.sleep(100);
            }
        }
    }

    /** Copies until the clients have to be made again. */
    private static void copy(String[] args) {
        String source = args[1];
        String target = args[2];
        try (KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(consumer(args));
                KafkaProducer<byte[], byte[]> producer = new KafkaProducer<>(producer(args))) {
            producer.initTransactions();
            consumer.subscribe(List.of(source));
            while (true) {
                ConsumerRecords<byte[], byte[]> records = consumer.poll(Duration.ofMillis(100));
                if (!records.isEmpty()) {
                    producer.beginTransaction();
                    try {
                        for (ConsumerRecord<byte[], byte[]> record : records) {
                            producer.send(new ProducerRecord<>(target, record.partition(), record.key(), record.value()));
                        }
                        producer.sendOffsetsToTransaction(records.nextOffsets(), consumer.groupMetadata());
                        producer.commitTransaction();
                        System.out.println("committed " + records.count());
                    } catch (KafkaException error) {
                        System.out.println("abort " + error);
                        producer.abortTransaction();
                        rewind(consumer);
                    }
                }
            }
        }
    }

    /** Continues at the committed offsets. */
    private static void rewind(KafkaConsumer<byte[], byte[]> consumer) {
        Map<TopicPartition, OffsetAndMetadata> committed = consumer.committed(consumer.assignment());
        for (TopicPartition partition : consumer.assignment()) {
            OffsetAndMetadata offset = committed.get(partition);
            if (offset == null) {
                consumer.seekToBeginning(List.of(partition));
            } else {
                consumer.seek(partition, offset);
            }
        }
    }

    private static Properties consumer(String[] args) {
        Properties properties = properties(args, "deserializer", "org.apache.kafka.common.serialization.ByteArrayDeserializer");
        properties.put("group.id", args[3]);
        properties.put("group.protocol", args[5]);
        properties.put("auto.offset.reset", "earliest");
        properties.put("enable.auto.commit", "false");
        properties.put("isolation.level", "read_committed");
        properties.put("max.poll.records", "50");
        return properties;
    }

    private static Properties producer(String[] args) {
        Properties properties = properties(args, "serializer", "org.apache.kafka.common.serialization.ByteArraySerializer");
        properties.put("transactional.id", args[4]);
        return properties;
    }

    private static Properties properties(String[] args, String what, String of) {
        Properties properties = new Properties();
        properties.put("bootstrap.servers", args[0]);
        properties.put("key." + what, of);
        properties.put("value." + what, of);
        for (int index = 6; index < args.length; index++) {
            String[] setting = args[index].split("=", 2);
            properties.put(setting[0], setting[1]);
        }
        return properties;
    }
}
