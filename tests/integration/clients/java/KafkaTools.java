// SPDX-License-Identifier: Apache-2.0
import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.EOFException;
import java.io.OutputStream;
import java.io.PrintStream;
import java.lang.reflect.InvocationTargetException;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.locks.LockSupport;
import org.apache.kafka.common.utils.Exit;

/**
 * Runs Kafka's command-line tools one after the other in one JVM, as requests on standard input ask, until it ends.
 *
 * A request is the number of words, and the words: the class and the arguments of a tool. A response is the exit code, and what the tool
 * has written to standard output and to standard error. A word is its length in bytes and its bytes, numbers are big-endian.
 */
public class KafkaTools {
    /** A stream that the tools may keep, with the output of the present tool. */
    private static class Output extends OutputStream {
        private ByteArrayOutputStream present = new ByteArrayOutputStream();

        @Override
        public synchronized void write(int octet) {
            present.write(octet);
        }

        @Override
        public synchronized void write(byte[] octets, int offset, int length) {
            present.write(octets, offset, length);
        }

        synchronized byte[] take() {
            byte[] taken = present.toByteArray();
            present = new ByteArrayOutputStream();
            return taken;
        }
    }

    public static void main(String[] args) throws Exception {
        DataInputStream requests = new DataInputStream(System.in);
        DataOutputStream responses = new DataOutputStream(System.out);
        Output out = new Output();
        Output err = new Output();
        System.setIn(new ByteArrayInputStream(new byte[0]));
        System.setOut(new PrintStream(out, true));
        System.setErr(new PrintStream(err, true));
        while (true) {
            String[] words;
            try {
                words = new String[requests.readInt()];
            } catch (EOFException end) {
                System.exit(0);
                return;
            }
            for (int place = 0; place < words.length; place++) {
                words[place] = new String(requests.readNBytes(requests.readInt()), StandardCharsets.UTF_8);
            }
            responses.writeInt(run(words));
            for (Output output : new Output[] {out, err}) {
                byte[] octets = output.take();
                responses.writeInt(octets.length);
                responses.write(octets);
            }
            responses.flush();
        }
    }

    /** Runs a tool in a thread. A tool that exits does not return, so its thread then stops for ever. */
    private static int run(String[] words) throws Exception {
        CompletableFuture<Integer> code = new CompletableFuture<>();
        Exit.Procedure exit = (status, message) -> {
            code.complete(status);
            while (true) {
                LockSupport.park();
            }
        };
        Exit.setExitProcedure(exit);
        Exit.setHaltProcedure(exit);
        Thread thread = new Thread(() -> code.complete(call(words)), "main");
        thread.setDaemon(true);
        thread.start();
        return code.get();
    }

    private static int call(String[] words) {
        String[] arguments = Arrays.copyOfRange(words, 1, words.length);
        try {
            Class.forName(words[0]).getMethod("main", String[].class).invoke(null, (Object) arguments);
            return 0;
        } catch (InvocationTargetException error) {
            System.err.print("Exception in thread \"main\" ");
            error.getCause().printStackTrace();
            return 1;
        } catch (ReflectiveOperationException error) {
            error.printStackTrace();
            return 1;
        }
    }
}
