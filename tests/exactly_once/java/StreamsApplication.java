// SPDX-License-Identifier: Apache-2.0
import java.util.Properties;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Produced;
import org.apache.kafka.streams.state.Stores;

/**
 * Kafka Streams, until it is killed. Usage: StreamsApplication ADDRESS SOURCE TARGET ID FOLDER GUARANTEE SETTING... It
 * writes each record to the target with the number of records of its key so far, which is in a store with a changelog.
 */
public class StreamsApplication {
    public static void main(String[] args) {
        StreamsBuilder builder = new StreamsBuilder();
        builder.stream(args[1], Consumed.with(Serdes.String(), Serdes.String()))
                .groupByKey()
                .count(Materialized.<String, Long>as(Stores.inMemoryKeyValueStore("counts"))
                        .withKeySerde(Serdes.String()).withValueSerde(Serdes.Long()).withCachingDisabled())
                .toStream()
                .mapValues(String::valueOf)
                .to(args[2], Produced.with(Serdes.String(), Serdes.String()));
        Properties properties = new Properties();
        properties.put("bootstrap.servers", args[0]);
        properties.put("application.id", args[3]);
        properties.put("state.dir", args[4]);
        properties.put("processing.guarantee", args[5]);
        properties.put("commit.interval.ms", "100");
        properties.put("num.stream.threads", "2");
        properties.put("replication.factor", "-1");
        properties.put("consumer.auto.offset.reset", "earliest");
        for (int index = 6; index < args.length; index++) {
            String[] setting = args[index].split("=", 2);
            properties.put(setting[0], setting[1]);
        }
        KafkaStreams streams = new KafkaStreams(builder.build(), properties);
        streams.setUncaughtExceptionHandler(error -> {
            System.out.println("replaced " + error);
            return StreamThreadExceptionResponse.REPLACE_THREAD;
        });
        streams.setStateListener((state, before) -> System.out.println("state " + state));
        streams.start();
    }
}
