<?php

declare(strict_types=1);

namespace Tidegate\Tests;

/** A child process, which ends with the test at the latest. */
final class Process
{
    /** @var resource */
    private $process;
    private readonly int $id;
    /** @var resource */
    private $input;
    /** @var resource */
    private $output;

    /**
     * @param list<string> $command
     * @param array<string, string> $environment
     */
    public function __construct(array $command, array $environment = [])
    {
        $process = proc_open($command, [['pipe', 'r'], ['pipe', 'w'], ['file', '/dev/null', 'w']], $pipes, null, $environment + getenv());
        if ($process === false) {
            throw new \RuntimeException("cannot start $command[0]");
        }
        [$this->process, $this->id] = [$process, proc_get_status($process)['pid']];
        [$this->input, $this->output] = $pipes;
    }

    public function __destruct()
    {
        $this->kill();
    }

    public function kill(): void
    {
        if (is_resource($this->process)) {
            posix_kill($this->id, SIGKILL);
            proc_close($this->process);
        }
    }

    /** Stops the process with SIGSTOP, so that it accepts connections and does not answer. */
    public function pause(): void
    {
        posix_kill($this->id, SIGSTOP);
    }

    public function resume(): void
    {
        posix_kill($this->id, SIGCONT);
    }

    /** Writes a line to the standard input of the process. */
    public function write(string $line): void
    {
        fwrite($this->input, "$line\n");
    }

    /** Returns the first match of the pattern in the lines that the process prints. */
    public function awaitOutput(string $pattern): string
    {
        while (($line = fgets($this->output)) !== false) {
            if (preg_match($pattern, $line, $match) === 1) {
                return $match[1];
            }
        }
        throw new \RuntimeException('the process ended without the expected output');
    }
}
