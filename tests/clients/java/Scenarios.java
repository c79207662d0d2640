// SPDX-License-Identifier: Apache-2.0
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.TimeUnit;
import java.util.function.BooleanSupplier;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.CommitFailedException;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.GroupType;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.RebalanceInProgressException;
import org.apache.kafka.common.errors.WakeupException;

/**
 * Runs members of groups with Apache Kafka's own consumer. Usage: Scenarios ADDRESS. It prints a line per scenario, and
 * "N passed, N failed" at the end.
 */
public class Scenarios {
    private static final int PARTITIONS = 6;
    private static final long PATIENCE_MS = 30_000;
    private static final String CLIENTS = "org.apache.kafka.clients.consumer.";

    enum Protocol {
        EAGER(CLIENTS + "RangeAssignor"), COOPERATIVE(CLIENTS + "CooperativeStickyAssignor"), CONSUMER(null);

        final String assignor;

        Protocol(String assignor) {
            this.assignor = assignor;
        }
    }

    interface Scenario {
        void run(String name) throws Exception;
    }

    private static String address;
    private static Admin admin;

    public static void main(String[] args) throws Exception {
        address = args[0];
        Map<String, Scenario> scenarios = new LinkedHashMap<>();
        scenarios.put("java-classic-eager", name -> share(name, Protocol.EAGER));
        scenarios.put("java-classic-cooperative", name -> share(name, Protocol.COOPERATIVE));
        scenarios.put("java-consumer", name -> share(name, Protocol.CONSUMER));
        scenarios.put("java-classic-static", name -> staticMember(name, Protocol.COOPERATIVE));
        scenarios.put("java-consumer-static", name -> staticMember(name, Protocol.CONSUMER));
        scenarios.put("java-classic-resume", name -> resume(name, Protocol.COOPERATIVE));
        scenarios.put("java-consumer-resume", name -> resume(name, Protocol.CONSUMER));
        scenarios.put("java-migration-eager", name -> migrate(name, Protocol.EAGER));
        scenarios.put("java-migration-cooperative", name -> migrate(name, Protocol.COOPERATIVE));
        int failed = 0;
        try (Admin shared = Admin.create(properties())) {
            admin = shared;
            for (Map.Entry<String, Scenario> scenario : scenarios.entrySet()) {
                long began = System.nanoTime();
                try {
                    scenario.getValue().run(scenario.getKey());
                    System.out.printf("ok %s %.1f s%n", scenario.getKey(), (System.nanoTime() - began) / 1e9);
                } catch (Exception | AssertionError error) {
                    failed++;
                    System.out.printf("FAILED %s: %s%n", scenario.getKey(), error);
                }
            }
        }
        System.out.printf("%d passed, %d failed%n", scenarios.size() - failed, failed);
        System.exit(failed > 0 ? 1 : 0);
    }

    /** Three members join one after the other and read all records. Then the first member leaves. */
    private static void share(String name, Protocol protocol) throws Exception {
        createTopic(name);
        try (Group group = new Group(name)) {
            for (int i = 0; i < 3; i++) {
                group.add(protocol, null);
                group.settle();
            }
            produce(name, 20);
            group.awaitSeen(20);
            group.leave(0);
            group.settle();
            produce(name, 5);
            group.awaitSeen(25);
            group.check();
        }
    }

    /** A static member that restarts gets its partitions back, and the other member keeps its own. */
    private static void staticMember(String name, Protocol protocol) throws Exception {
        createTopic(name);
        try (Group group = new Group(name)) {
            group.add(protocol, "one");
            group.settle();
            group.add(protocol, "two");
            group.settle();
            Set<Integer> owned = group.members.get(0).owned();
            Member other = group.members.get(1);
            int revocations = other.revocations;
            group.leave(0);
            Member restarted = group.add(protocol, "one");
            await("the same partitions as before", () -> restarted.owned().equals(owned));
            expect(other.revocations == revocations, "the other static member lost partitions");
            group.check();
        }
    }

    /** A new member of the group begins at the offsets that the old member committed. */
    private static void resume(String name, Protocol protocol) throws Exception {
        createTopic(name);
        for (int round = 0; round < 2; round++) {
            produce(name, 10);
            Group group = new Group(name);
            try (group) {
                group.add(protocol, null);
                await("the new records", () -> group.seen.size() >= 10 * PARTITIONS);
            }
            int first = 10 * round;
            expect(group.seen.stream().allMatch(record -> record.offset >= first), "records are read again");
        }
    }

    /** Three members move to the consumer protocol and back, one by one, while records are produced. */
    private static void migrate(String name, Protocol protocol) throws Exception {
        createTopic(name);
        try (Group group = new Group(name)) {
            for (int i = 0; i < 3; i++) group.add(protocol, null);
            group.settle();
            int rounds = 0;
            for (Protocol next : List.of(Protocol.CONSUMER, protocol)) {
                for (int i = 0; i < 3; i++) {
                    group.leave(0);
                    produce(name, 10);
                    rounds++;
                    group.add(next, null);
                    group.settle();
                }
                GroupType expected = next == Protocol.CONSUMER ? GroupType.CONSUMER : GroupType.CLASSIC;
                GroupType actual = admin.listGroups().all().get(20, TimeUnit.SECONDS).stream()
                    .filter(listing -> listing.groupId().equals(name)).findFirst().orElseThrow().type().orElseThrow();
                expect(actual == expected, "the group has type " + actual + ", not " + expected);
            }
            group.awaitSeen(10 * rounds);
            group.check();
        }
    }

    record Seen(int partition, long offset) { }

    /** A group: its members, the owners of the partitions, and the records that all members have seen. */
    static final class Group implements AutoCloseable {
        final String name;
        final List<Member> members = new ArrayList<>();
        final Set<Seen> seen = ConcurrentHashMap.newKeySet();
        final Collection<String> faults = new ConcurrentLinkedQueue<>();
        private final Map<Integer, Member> owners = new HashMap<>();

        Group(String name) {
            this.name = name;
        }

        Member add(Protocol protocol, String instance) {
            Member member = new Member(this, protocol, instance);
            members.add(member);
            member.start();
            return member;
        }

        void leave(int index) throws Exception {
            Member gone = members.remove(index);
            gone.end();
            // A static member keeps its partitions while it is away, so the client calls no callback.
            gave(gone, gone.owned());
        }

        synchronized void took(Member member, Collection<Integer> partitions) {
            for (int partition : partitions) {
                Member owner = owners.put(partition, member);
                if (owner != null && owner != member) faults.add("partition " + partition + " had two owners");
            }
        }

        synchronized void gave(Member member, Collection<Integer> partitions) {
            for (int partition : partitions) owners.remove(partition, member);
        }

        /** Waits until the members own all partitions, each partition once, as evenly as possible. */
        void settle() throws Exception {
            await("a balanced assignment", () -> {
                List<Set<Integer>> owned = members.stream().map(Member::owned).toList();
                Set<Integer> all = new HashSet<>();
                owned.forEach(all::addAll);
                int sum = owned.stream().mapToInt(Set::size).sum();
                int least = owned.stream().mapToInt(Set::size).min().orElse(0);
                int most = owned.stream().mapToInt(Set::size).max().orElse(0);
                return sum == PARTITIONS && all.size() == PARTITIONS && most - least <= 1;
            });
        }

        void awaitSeen(int perPartition) throws Exception {
            await(perPartition + " records of each partition", () -> seen.size() == perPartition * PARTITIONS);
        }

        void check() {
            expect(faults.isEmpty(), faults.toString());
        }

        @Override
        public void close() throws Exception {
            while (!members.isEmpty()) leave(0);
        }
    }

    /** A consumer with a thread that polls it. It commits records before they count as seen. */
    static final class Member extends Thread implements ConsumerRebalanceListener {
        volatile int revocations;
        private final Group group;
        private final KafkaConsumer<byte[], byte[]> consumer;
        private final Set<Integer> owned = new TreeSet<>();
        private volatile boolean ending;

        Member(Group group, Protocol protocol, String instance) {
            this.group = group;
            Properties config = properties();
            config.put("group.id", group.name);
            config.put("auto.offset.reset", "earliest");
            config.put("enable.auto.commit", "false");
            config.put("fetch.max.wait.ms", "200");
            config.put("key.deserializer", "org.apache.kafka.common.serialization.ByteArrayDeserializer");
            config.put("value.deserializer", "org.apache.kafka.common.serialization.ByteArrayDeserializer");
            if (instance != null) config.put("group.instance.id", instance);
            if (protocol == Protocol.CONSUMER) {
                config.put("group.protocol", "consumer");
            } else {
                config.put("partition.assignment.strategy", protocol.assignor);
                config.put("session.timeout.ms", "6000");
                config.put("heartbeat.interval.ms", "300");
            }
            consumer = new KafkaConsumer<>(config);
            setDaemon(true);
        }

        @Override
        public void run() {
            try (consumer) {
                consumer.subscribe(List.of(group.name), this);
                while (!ending) {
                    ConsumerRecords<byte[], byte[]> records = consumer.poll(Duration.ofMillis(100));
                    if (records.isEmpty()) continue;
                    try {
                        consumer.commitSync();
                    } catch (CommitFailedException | RebalanceInProgressException late) {
                        rewind(records);
                        continue;
                    }
                    records.forEach(record -> group.seen.add(new Seen(record.partition(), record.offset())));
                }
            } catch (WakeupException ended) {
                return;
            } catch (RuntimeException error) {
                group.faults.add(error.toString());
            }
        }

        /** Reads records again whose commit failed, if this member still owns the partition. Else the new owner reads them. */
        private void rewind(ConsumerRecords<byte[], byte[]> records) {
            for (TopicPartition partition : records.partitions()) {
                if (consumer.assignment().contains(partition)) {
                    consumer.seek(partition, records.records(partition).get(0).offset());
                }
            }
        }

        void end() throws InterruptedException {
            ending = true;
            join(PATIENCE_MS);
            if (isAlive()) group.faults.add("a consumer hangs in poll or close");
        }

        synchronized Set<Integer> owned() {
            return new TreeSet<>(owned);
        }

        @Override
        public synchronized void onPartitionsAssigned(Collection<TopicPartition> partitions) {
            List<Integer> numbers = partitions.stream().map(TopicPartition::partition).toList();
            group.took(this, numbers);
            owned.addAll(numbers);
        }

        @Override
        public synchronized void onPartitionsRevoked(Collection<TopicPartition> partitions) {
            List<Integer> numbers = partitions.stream().map(TopicPartition::partition).toList();
            revocations += numbers.size();
            owned.removeAll(numbers);
            group.gave(this, numbers);
        }
    }

    private static Properties properties() {
        Properties config = new Properties();
        config.put("bootstrap.servers", address);
        return config;
    }

    private static void createTopic(String name) throws Exception {
        admin.createTopics(List.of(new NewTopic(name, PARTITIONS, (short) 1))).all().get(20, TimeUnit.SECONDS);
    }

    /** Writes `count` records to each partition. */
    private static void produce(String topic, int count) {
        Properties config = properties();
        config.put("key.serializer", "org.apache.kafka.common.serialization.ByteArraySerializer");
        config.put("value.serializer", "org.apache.kafka.common.serialization.ByteArraySerializer");
        try (KafkaProducer<byte[], byte[]> producer = new KafkaProducer<>(config)) {
            for (int partition = 0; partition < PARTITIONS; partition++)
                for (int i = 0; i < count; i++) producer.send(new ProducerRecord<>(topic, partition, null, new byte[] {'x'}));
            producer.flush();
        }
    }

    private static void await(String what, BooleanSupplier condition) throws Exception {
        long deadline = System.currentTimeMillis() + PATIENCE_MS;
        while (!condition.getAsBoolean()) {
            expect(System.currentTimeMillis() < deadline, "not within " + PATIENCE_MS + " ms: " + what);
            Thread.sleep(20);
        }
    }

    private static void expect(boolean condition, String otherwise) {
        if (!condition) throw new AssertionError(otherwise);
    }
}
