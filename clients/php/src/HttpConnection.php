<?php

declare(strict_types=1);

namespace Tidegate;

use Tidegate\Exception\Invalid;
use Tidegate\Exception\Protocol;
use Tidegate\Exception\Unavailable;

/**
 * An HTTP/1.1 connection to the service. It is kept open between requests of one process, and everything ends at a
 * deadline: connecting, writing and reading. PHP's own HTTP streams have a timeout per read, and no keep-alive.
 *
 * @internal
 */
final class HttpConnection
{
    private const HEAD_BYTES_MAX = 64 * 1024;
    private const BODY_BYTES_MAX = 1024 * 1024;

    private readonly string $address;
    private readonly string $host;
    private readonly string $basePath;
    /** @var ?resource */
    private $stream = null;
    private int $processId = 0;
    /** The bytes that were received and not yet read. */
    private string $buffer = '';

    /**
     * @param array<string, mixed> $tls context options of PHP's `ssl` streams
     * @throws Invalid if the URL is not that of a service
     */
    public function __construct(private readonly string $url, private readonly array $tls)
    {
        $parts = parse_url($url);
        $scheme = is_array($parts) ? strtolower($parts['scheme'] ?? '') : '';
        $isUrl = in_array($scheme, ['http', 'https'], true) && ($parts['host'] ?? '') !== '' && preg_match('/[\x00-\x20\x7f]/', $url) !== 1;
        if (!$isUrl || isset($parts['query']) || isset($parts['fragment']) || isset($parts['user'])) {
            throw new Invalid('expected the URL of the service, such as http://127.0.0.1:8080');
        }
        $port = $parts['port'] ?? ($scheme === 'https' ? 443 : 80);
        $this->address = ($scheme === 'https' ? 'ssl' : 'tcp') . "://{$parts['host']}:$port";
        $this->host = "{$parts['host']}:$port";
        $this->basePath = rtrim($parts['path'] ?? '', '/');
    }

    /**
     * Sends a request and returns the status, the headers in lower case and the body.
     *
     * @param list<string> $headers
     * @return array{int, array<string, string>, string}
     * @throws Unavailable if the service cannot be reached or does not answer within $seconds
     * @throws Protocol if the answer is not HTTP or too long
     */
    public function post(string $path, array $headers, string $body, float $seconds): array
    {
        $end = hrtime(true) + (int) (1e9 * $seconds);
        $request = implode("\r\n", [
            "POST $this->basePath$path HTTP/1.1", "host: $this->host", 'content-type: application/json',
            'content-length: ' . strlen($body), ...$headers, '', $body,
        ]);
        try {
            $this->open($end, $seconds);
            $this->write($request, $end, $seconds);
            return $this->readResponse($end, $seconds);
        } catch (Unavailable | Protocol $failure) {
            // A late answer must not be taken for the answer to the next request.
            $this->close();
            throw $failure;
        }
    }

    public function close(): void
    {
        if ($this->stream !== null && $this->processId === getmypid()) {
            fclose($this->stream);
        }
        $this->stream = null;
        $this->buffer = '';
    }

    private function open(int $end, float $seconds): void
    {
        if ($this->stream !== null && ($this->processId !== getmypid() || $this->isReadable(0))) {
            // A connection of the parent process, or one that the service has closed.
            $this->close();
        }
        if ($this->stream !== null) {
            return;
        }
        $context = stream_context_create(['ssl' => $this->tls, 'socket' => ['tcp_nodelay' => true]]);
        $reason = '';
        set_error_handler(static function (int $level, string $message) use (&$reason): bool {
            $reason = $message;
            return true;
        });
        try {
            $stream = stream_socket_client($this->address, $code, $text, $this->left($end, $seconds), STREAM_CLIENT_CONNECT, $context);
        } finally {
            restore_error_handler();
        }
        if ($stream === false) {
            throw new Unavailable("cannot reach the service at $this->url: " . ($text !== '' ? $text : $reason));
        }
        stream_set_blocking($stream, false);
        $this->stream = $stream;
        $this->processId = (int) getmypid();
    }

    private function write(string $bytes, int $end, float $seconds): void
    {
        while ($bytes !== '') {
            $written = @fwrite($this->stream, $bytes);
            if ($written === false) {
                throw new Unavailable("the service at $this->url closed the connection");
            }
            $bytes = substr($bytes, $written);
            if ($bytes !== '') {
                $this->await($end, $seconds, isWriting: true);
            }
        }
    }

    /** @return array{int, array<string, string>, string} */
    private function readResponse(int $end, float $seconds): array
    {
        do {
            while (($headEnd = strpos($this->buffer, "\r\n\r\n")) === false) {
                if (strlen($this->buffer) > self::HEAD_BYTES_MAX) {
                    throw new Protocol("the service at $this->url returned headers of more than " . self::HEAD_BYTES_MAX . ' bytes');
                }
                $this->read($end, $seconds);
            }
            $lines = explode("\r\n", substr($this->buffer, 0, $headEnd));
            $this->buffer = substr($this->buffer, $headEnd + 4);
            if (preg_match('#^HTTP/1\.[01] ([1-5]\d\d)( |$)#', array_shift($lines), $match) !== 1) {
                throw new Protocol("the server at $this->url does not speak HTTP/1.1");
            }
            $status = (int) $match[1];
        } while ($status < 200);
        $headers = [];
        foreach ($lines as $line) {
            [$name, $value] = explode(':', $line, 2) + [1 => ''];
            $name = strtolower(trim($name));
            $headers[$name] = isset($headers[$name]) ? $headers[$name] . ', ' . trim($value) : trim($value);
        }
        $body = $this->readBody($headers, $end, $seconds);
        if (strtolower($headers['connection'] ?? '') === 'close') {
            $this->close();
        }
        return [$status, $headers, $body];
    }

    /** @param array<string, string> $headers */
    private function readBody(array $headers, int $end, float $seconds): string
    {
        if (strtolower($headers['transfer-encoding'] ?? '') === 'chunked') {
            $body = '';
            do {
                $size = $this->readLine($end, $seconds);
                if (preg_match('/^([0-9a-f]{1,7})\s*(;|$)/iD', $size, $match) !== 1) {
                    throw new Protocol("the service at $this->url returned a malformed chunk");
                }
                $chunk = $this->readBytes((int) hexdec($match[1]), $end, $seconds);
                $body .= $chunk;
                $this->boundBody(strlen($body));
                // After the last chunk, trailers end with an empty line.
                while ($this->readLine($end, $seconds) !== '') {
                    $this->boundBody(strlen($body));
                }
            } while ($chunk !== '');
            return $body;
        }
        $length = $headers['content-length'] ?? null;
        if ($length !== null && ctype_digit($length) && strlen($length) < 10) {
            return $this->readBytes((int) $length, $end, $seconds);
        }
        throw new Protocol("the service at $this->url returned a body without a length");
    }

    private function readBytes(int $count, int $end, float $seconds): string
    {
        $this->boundBody($count);
        while (strlen($this->buffer) < $count) {
            $this->read($end, $seconds);
        }
        $bytes = substr($this->buffer, 0, $count);
        $this->buffer = substr($this->buffer, $count);
        return $bytes;
    }

    private function readLine(int $end, float $seconds): string
    {
        while (($lineEnd = strpos($this->buffer, "\r\n")) === false) {
            $this->boundBody(strlen($this->buffer));
            $this->read($end, $seconds);
        }
        $line = substr($this->buffer, 0, $lineEnd);
        $this->buffer = substr($this->buffer, $lineEnd + 2);
        return $line;
    }

    private function boundBody(int $bytes): void
    {
        if ($bytes > self::BODY_BYTES_MAX) {
            throw new Protocol("the service at $this->url returned more than " . self::BODY_BYTES_MAX . ' bytes');
        }
    }

    private function read(int $end, float $seconds): void
    {
        while (true) {
            $bytes = @fread($this->stream, 8192);
            if ($bytes !== false && $bytes !== '') {
                $this->buffer .= $bytes;
                return;
            }
            if ($bytes === false || feof($this->stream)) {
                throw new Unavailable("the service at $this->url closed the connection");
            }
            $this->await($end, $seconds, isWriting: false);
        }
    }

    private function await(int $end, float $seconds, bool $isWriting): void
    {
        $leftUs = (int) (1e6 * $this->left($end, $seconds));
        $read = $isWriting ? [] : [$this->stream];
        $write = $isWriting ? [$this->stream] : [];
        $except = [];
        // A signal may interrupt the wait. The caller then tries again.
        @stream_select($read, $write, $except, intdiv($leftUs, 1_000_000), $leftUs % 1_000_000);
    }

    private function isReadable(int $us): bool
    {
        $read = [$this->stream];
        $write = $except = [];
        return @stream_select($read, $write, $except, 0, $us) !== 0;
    }

    /** Returns the seconds until the deadline. */
    private function left(int $end, float $seconds): float
    {
        $left = ($end - hrtime(true)) / 1e9;
        if ($left <= 0) {
            throw new Unavailable(sprintf('the service at %s did not answer within %g ms', $this->url, 1000 * $seconds));
        }
        return $left;
    }
}
