<?php

declare(strict_types=1);

// Answers HTTP requests. Arguments: MODE STATUS LOG BODY. Modes: plain, chunked, once (closes after each answer), silent
// (never answers), raw (sends the body as it is), drip (sends the first answer slowly, byte by byte, and then is plain). A `/v1/refund` is answered with {"applied":true}. The log gets a line
// per connection and per request.

[, $mode, $status, $log, $body] = $argv;
$server = stream_socket_server('tcp://127.0.0.1:0');
echo 'http://', stream_socket_get_name($server, false), "\n";
$connections = [];
$buffers = [];
while (true) {
    $read = [$server, ...$connections];
    $write = $except = [];
    stream_select($read, $write, $except, null);
    foreach ($read as $stream) {
        if ($stream === $server) {
            $connection = stream_socket_accept($server);
            $connections[(int) $connection] = $connection;
            $buffers[(int) $connection] = '';
            file_put_contents($log, "connection\n", FILE_APPEND);
            continue;
        }
        $id = (int) $stream;
        $bytes = fread($stream, 65536);
        if ($bytes === '' || $bytes === false) {
            unset($connections[$id]);
            continue;
        }
        $buffers[$id] .= $bytes;
        $isComplete = preg_match('/^POST (\S+) .*?content-length: (\d+).*?\r\n\r\n(.*)$/s', $buffers[$id], $match) === 1;
        if ($mode === 'silent' || !$isComplete || strlen($match[3]) < (int) $match[2]) {
            continue;
        }
        file_put_contents($log, "$match[1] $match[3]" . (str_contains($buffers[$id], 'authorization: Bearer T') ? ' with token' : '') . "\n", FILE_APPEND);
        $buffers[$id] = '';
        [$code, $text] = $match[1] === '/v1/refund' ? ['200', '{"applied":true}'] : [$status, $body];
        $head = "HTTP/1.1 $code Text\r\nx-ratelimit-limit: 10\r\nx-other: secret\r\n";
        if ($mode === 'drip') {
            $mode = 'plain';
            foreach (str_split($head . 'content-length: ' . strlen($text) . "\r\n\r\n$text") as $letter) {
                if (!@fwrite($stream, $letter)) {
                    break;
                }
                usleep(5_000);
            }
            continue;
        }
        fwrite($stream, match ($mode) {
            'chunked' => $head . "transfer-encoding: chunked\r\n\r\n" . implode('', array_map(fn (string $part) => dechex(strlen($part)) . "\r\n$part\r\n", str_split($text, 7))) . "0\r\n\r\n",
            'raw' => $text,
            'once' => $head . "connection: close\r\ncontent-length: " . strlen($text) . "\r\n\r\n$text",
            default => $head . 'content-length: ' . strlen($text) . "\r\n\r\n$text",
        });
        if ($mode === 'once') {
            fclose($stream);
            unset($connections[$id]);
        }
    }
}
