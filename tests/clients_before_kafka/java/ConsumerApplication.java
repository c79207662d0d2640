// SPDX-License-Identifier: Apache-2.0
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import java.util.regex.Pattern;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.SubscriptionPattern;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.errors.RebalanceInProgressException;
import org.apache.kafka.common.errors.RetriableException;

/**
 * Consumers that copy a topic at least once, until they are killed. Usage: ConsumerApplication ADDRESS SOURCE TARGET...
 * The target is also the group, and says how its two members consume: java-classic, java-classic-regex,
 * java-classic-static, and the same with java-consumer. The program prints a line for each error that a call has thrown.
 */
public class ConsumerApplication {
    public static void main(String[] args) throws InterruptedException {
        KafkaProducer<byte[], byte[]> producer = new KafkaProducer<>(producer(args[0]));
        for (int index = 2; index < args.length; index++) {
            for (int number = 0; number < 2; number++) {
                String target = args[index];
                String instance = target.endsWith("static") ? "instance-" + number : null;
                new Thread(() -> copy(args[0], args[1], target, instance, producer), target).start();
            }
        }
    }

    private static void copy(
            String address, String source, String target, String instance, KafkaProducer<byte[], byte[]> producer) {
        boolean isConsumer = target.startsWith("java-consumer");
        KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(consumer(address, target, isConsumer, instance));
        String pattern = source.substring(0, source.length() - 1) + ".";
        if (!target.endsWith("regex")) {
            consumer.subscribe(List.of(source));
        } else if (isConsumer) {
            consumer.subscribe(new SubscriptionPattern(pattern));
        } else {
            consumer.subscribe(Pattern.compile(pattern));
        }
        while (true) {
            try {
                ConsumerRecords<byte[], byte[]> records = consumer.poll(Duration.ofMillis(200));
                List<Future<?>> futures = new ArrayList<>();
                for (ConsumerRecord<byte[], byte[]> record : records) {
                    futures.add(producer.send(new ProducerRecord<>(target, record.partition(), record.key(), record.value())));
                }
                for (Future<?> future : futures) {
                    future.get();
                }
                if (!records.isEmpty()) {
                    consumer.commitSync();
                }
            } catch (RetriableException | RebalanceInProgressException error) {
                System.out.println("retriable " + target + " " + error);
            } catch (RuntimeException | InterruptedException | ExecutionException error) {
                System.out.println("error " + target + " " + error);
            }
        }
    }

    private static Properties consumer(String address, String group, boolean isConsumer, String instance) {
        Properties properties = properties(address, "deserializer", "org.apache.kafka.common.serialization.ByteArrayDeserializer");
        properties.put("group.id", group);
        properties.put("group.protocol", isConsumer ? "consumer" : "classic");
        properties.put("auto.offset.reset", "earliest");
        properties.put("enable.auto.commit", "false");
        if (instance != null) {
            properties.put("group.instance.id", instance);
        }
        return properties;
    }

    private static Properties producer(String address) {
        return properties(address, "serializer", "org.apache.kafka.common.serialization.ByteArraySerializer");
    }

    private static Properties properties(String address, String what, String of) {
        Properties properties = new Properties();
        properties.put("bootstrap.servers", address);
        properties.put("key." + what, of);
        properties.put("value." + what, of);
        return properties;
    }
}
