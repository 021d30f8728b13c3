<?php

declare(strict_types=1);

namespace Tidegate\Tests;

use PHPUnit\Framework\TestCase;
use Tidegate\Demand;
use Tidegate\Exception\Invalid;
use Tidegate\Limit;
use Tidegate\Problem;
use Tidegate\ScriptCall;
use Tidegate\TrustedProxies;

final class VectorsTest extends TestCase
{
    public function testKeys(): void
    {
        foreach (Servers::vectors()['keys'] as $vector) {
            $subject = (string) hex2bin($vector['subject_hex']);
            $call = ScriptCall::check($vector['prefix'], [new Demand($subject, $vector['limit'])]);
            self::assertSame([$vector['ban_key'], $vector['key']], $call->keys);
        }
    }

    public function testLimits(): void
    {
        foreach (Servers::vectors()['limits'] as $vector) {
            try {
                $line = Limit::parse($vector['text'])->line(1);
            } catch (Invalid $error) {
                $line = null;
                preg_match('/; did you mean (.*)\?$/', $error->getMessage(), $suggestion);
                self::assertSame($vector['meant'] ?? null, $suggestion[1] ?? null, $vector['text']);
            }
            self::assertSame($vector['line'] ?? null, $line, $vector['text']);
        }
    }

    public function testAddresses(): void
    {
        foreach (Servers::vectors()['addresses'] as $vector) {
            $proxies = new TrustedProxies($vector['trusted'], $vector['header']);
            $address = $proxies->clientAddress($vector['peer'], $vector['lines']);
            self::assertSame(inet_ntop((string) inet_pton($vector['address'])), inet_ntop($address), json_encode($vector));
            self::assertSame($vector['subject'], TrustedProxies::subject($address), json_encode($vector));
        }
    }

    public function testAnswers(): void
    {
        foreach (Servers::vectors()['answers'] as $vector) {
            $demands = $reply = [];
            foreach ($vector['limits'] as $index => $status) {
                $demands[] = new Demand("key $index", $status['limit'], $status['cost']);
                array_push($reply, (int) $status['allowed'], $status['remaining'], $status['retry_after_us'], $status['next_after_us'], $status['reset_after_us'], 0);
            }
            $decision = ScriptCall::check('tidegate', $demands)->decode([$vector['at_us'], 1, ...$reply]);
            self::assertSame($vector['status'], $decision->statusCode());
            $headers = $decision->headers();
            if (!isset($vector['headers']['content-type'])) {
                unset($headers['content-type']);
            }
            ksort($headers);
            ksort($vector['headers']);
            self::assertSame($vector['headers'], $headers);
            if (!$decision->allowed) {
                self::assertEquals($vector['body'], json_decode($decision->body(), true));
                self::assertSame(Problem::CONTENT_TYPE, $decision->headers(Problem::CONTENT_TYPE)['content-type']);
                self::assertEquals($vector['problem'], json_decode($decision->body(Problem::CONTENT_TYPE), true));
            }
        }
    }

    public function testAcceptHeadersThatAskForAProblem(): void
    {
        foreach (Servers::vectors()['accepts'] as $vector) {
            // PSR-7 joins the lines of a header in this way.
            self::assertSame($vector['problem'], Problem::isAskedForBy(implode(', ', $vector['lines'])), json_encode($vector['lines']));
        }
    }

    public function testScriptIsThatOfTheServer(): void
    {
        self::assertFileEquals(Servers::ROOT . '/crates/tidegate-redis/lua/tidegate.lua', __DIR__ . '/../src/tidegate.lua');
        self::assertSame(Servers::vectors()['script_sha1'] ?? ScriptCall::sha1(), ScriptCall::sha1());
    }
}
