package listener_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	"pgregory.net/rapid"

	"github.com/gormoutbox/outbox/backoff"
	"github.com/gormoutbox/outbox/engine"
	"github.com/gormoutbox/outbox/listener"
)

// bundle is a notifier in a bubble, listening to a fake server.
type bundle struct {
	server   *fakeServer
	notifier *listener.Notifier
	logs     *observer.ObservedLogs
	stop     func() error // ends Listen and gives its error

	mu     sync.Mutex
	events []string // "connect", "probe", "listen", "all" or the outbox of a wake
	states []engine.PushState
}

func (b *bundle) record(event string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.events = append(b.events, event)
}

// recorded gives the events and forgets them.
func (b *bundle) recorded() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	events := b.events
	b.events = nil
	return events
}

func (b *bundle) dials() (n int) {
	b.server.set(func(s *fakeServer) { n = s.dials })
	return n
}

func (b *bundle) refused() (n int) {
	b.server.set(func(s *fakeServer) { n = s.refused })
	return n
}

func (b *bundle) warnings() []string {
	var lines []string
	for _, e := range b.logs.FilterLevelExact(zapcore.WarnLevel).All() {
		lines = append(lines, e.Message)
	}
	return lines
}

func (b *bundle) expect(t *testing.T, want engine.PushState) {
	t.Helper()
	synctest.Wait()
	if got := b.notifier.State(); got != want {
		t.Fatalf("state %v, want %v; log %v", got, want, b.logs.All())
	}
}

// inBubble runs test with a notifier that listens. change, if not nil, is
// applied before it is made.
func inBubble(t *testing.T, change func(*bundle, *listener.Config), test func(*testing.T, *bundle)) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		logger, logs := observed()
		b := &bundle{server: &fakeServer{}, logs: logs}
		b.server.onListen = func(channel string) {
			if channel == "gormoutbox_probe" {
				b.record("probe")
			} else {
				b.record("listen")
			}
		}
		cfg := listener.Config{
			Channels: func(context.Context) ([]string, error) { return []string{"outbox"}, nil },
			Connect: func(ctx context.Context) (*pgx.Conn, error) {
				b.record("connect")
				return b.server.connect(ctx)
			},
			Logger:   logger,
			Notify:   b.server.notify,
			OnState:  func(s engine.PushState) { b.states = append(b.states, s) },
			Outboxes: []string{"mails", "orders"},
		}
		if change != nil {
			change(b, &cfg)
		}
		b.listen(t, cfg)
		defer func() { _ = b.stop() }() // if test gives up
		test(t, b)
		if err := b.stop(); !errors.Is(err, context.Canceled) {
			t.Errorf("Listen returned %v", err)
		}
		b.expect(t, engine.Polling)
		if open := b.server.connections(); len(open) != 0 {
			t.Errorf("%d connections are left", len(open))
		}
		time.Sleep(15 * time.Second) // on a dead network, for pgx to give up cancelling
	})
}

func (b *bundle) listen(t *testing.T, cfg listener.Config) {
	n, err := listener.NewNotifier(cfg)
	if err != nil {
		t.Fatal(err)
	}
	b.notifier = n
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	b.stop = sync.OnceValue(func() error { cancel(); return <-done })
	go func() {
		done <- n.Listen(ctx, func(w engine.Wake) {
			if w.All && w.Outbox == "" {
				b.record("all")
				return
			}
			b.record(w.Outbox)
		})
	}()
}

func TestNotifierPassesWakesOn(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, b *bundle) {
		b.expect(t, engine.Push)
		if got, want := b.recorded(), []string{"connect", "probe", "connect", "listen", "all"}; !slices.Equal(got, want) {
			t.Errorf("at the start: %v, want %v", got, want)
		}
		for _, payload := range []string{
			engine.EncodeWake(engine.Wake{Outbox: "orders", Hash: 7}),
			engine.EncodeWake(engine.Wake{Outbox: "audit", Hash: 7}), // of others
			"", "self-test", strings.Repeat("x", 32), // of nobody
			engine.EncodeWake(engine.Wake{Outbox: "mails", All: true}),
		} {
			if err := b.server.notify(t.Context(), "outbox", payload); err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		if got, want := b.recorded(), []string{"orders", "mails"}; !slices.Equal(got, want) {
			t.Errorf("woken: %v, want %v", got, want)
		}
		_ = b.stop()
		if want := []engine.PushState{engine.Degraded, engine.Push, engine.Polling}; !slices.Equal(b.states, want) {
			t.Errorf("states %v, want %v", b.states, want)
		}
		if b.logs.Len() != 1 {
			t.Errorf("log: %v", b.logs.All())
		}
	})
}

// A healthy connection stays, and its tests are rare.
func TestNotifierIsQuietWhenHealthy(t *testing.T) {
	tests := 0
	inBubble(t, func(b *bundle, cfg *listener.Config) {
		cfg.Notify = func(ctx context.Context, channel, payload string) error {
			tests++
			return b.server.notify(ctx, channel, payload)
		}
	}, func(t *testing.T, b *bundle) {
		time.Sleep(24 * time.Hour)
		b.expect(t, engine.Push)
		if b.dials() != 2 || b.logs.Len() != 1 {
			t.Errorf("%d connections, log %v", b.dials(), b.logs.All())
		}
		if tests < 24*120 || tests > 24*120*10/9+1 {
			t.Errorf("%d self-tests a day, want one in 27 to 30 seconds", tests)
		}
	})
}

func TestNotifierStopsWhereverItIs(t *testing.T) {
	t.Parallel()
	block := func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	places := map[string]func(*bundle, *listener.Config){
		"finding the channels": func(_ *bundle, cfg *listener.Config) {
			cfg.Channels = func(ctx context.Context) ([]string, error) { return nil, block(ctx) }
		},
		"connecting": func(_ *bundle, cfg *listener.Config) {
			cfg.Connect = func(ctx context.Context) (*pgx.Conn, error) { return nil, block(ctx) }
		},
		"on a dead network": func(b *bundle, _ *listener.Config) { b.server.dead = true },
		"in LISTEN":         func(b *bundle, _ *listener.Config) { b.server.hang = true },
		"sending a self-test": func(_ *bundle, cfg *listener.Config) {
			cfg.Notify = func(ctx context.Context, _, _ string) error { return block(ctx) }
		},
		"waiting for the echo": func(b *bundle, _ *listener.Config) { b.server.pooled = true },
		"waiting to reconnect": func(b *bundle, _ *listener.Config) { b.server.down = true },
	}
	for name, place := range places {
		t.Run(name, func(t *testing.T) {
			inBubble(t, place, func(t *testing.T, b *bundle) {
				b.expect(t, engine.Degraded)
				begin := time.Now()
				_ = b.stop()
				if d := time.Since(begin); d > 2*time.Second {
					t.Errorf("stopped after %v", d)
				}
			})
		})
	}
}

func TestNotifierAsksForTheChannelsEachTime(t *testing.T) {
	answers := 0
	inBubble(t, func(_ *bundle, cfg *listener.Config) {
		cfg.Channels = func(context.Context) ([]string, error) {
			switch answers++; answers {
			case 1:
				return nil, errors.New("not migrated")
			case 2:
				return nil, nil
			}
			return []string{"other"}, nil
		}
	}, func(t *testing.T, b *bundle) {
		b.expect(t, engine.Degraded)
		if got := b.logs.All()[0].ContextMap()["error"]; got != "find the channels to listen on: not migrated" {
			t.Errorf("logged error %q", got)
		}
		time.Sleep(5 * time.Second)
		b.expect(t, engine.Push)
		if answers != 3 {
			t.Errorf("asked %d times", answers)
		}
	})
}

func TestNotifierListensAgain(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, b *bundle) {
		b.expect(t, engine.Push)
		_ = b.stop()
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		if err := b.notifier.Listen(ctx, func(engine.Wake) {}); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Listen returned %v", err)
		}
		if want := []engine.PushState{engine.Degraded, engine.Push, engine.Polling, engine.Degraded, engine.Push, engine.Polling}; !slices.Equal(b.states, want) {
			t.Errorf("states %v, want %v", b.states, want)
		}
	})
}

func TestNewNotifierNamesTheField(t *testing.T) {
	t.Parallel()
	for want, change := range map[string]func(*listener.Config){
		"listener: Channels is missing":              func(c *listener.Config) { c.Channels = nil },
		"listener: Connect is missing":               func(c *listener.Config) { c.Connect = nil },
		"listener: Notify is missing":                func(c *listener.Config) { c.Notify = nil },
		"listener: Outboxes is empty":                func(c *listener.Config) { c.Outboxes = nil },
		"listener: SelfTestEvery -1ns is negative":   func(c *listener.Config) { c.SelfTestEvery = -1 },
		"listener: SelfTestTimeout -1ns is negative": func(c *listener.Config) { c.SelfTestTimeout = -1 },
		"listener: Backoff: backoff: Func is nil":    func(c *listener.Config) { c.Backoff = backoff.Func(nil) },
		"": func(*listener.Config) {},
	} {
		server := &fakeServer{}
		cfg := listener.Config{
			Channels: func(context.Context) ([]string, error) { return nil, nil },
			Connect:  server.connect, Notify: server.notify, Outboxes: []string{"orders"},
		}
		change(&cfg)
		got := ""
		if _, err := listener.NewNotifier(cfg); err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("error %q, want %q", got, want)
		}
	}
}

// C24
func TestPayloadsAreOfConstantSize(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		w := engine.Wake{Outbox: rapid.String().Draw(t, "outbox"), All: rapid.Bool().Draw(t, "all")}
		if !w.All {
			w.Hash = rapid.Uint64().Draw(t, "hash")
		}
		payload := engine.EncodeWake(w)
		if len(payload) != 32 {
			t.Fatalf("payload of %d bytes: %q", len(payload), payload)
		}
		if got, ok := engine.DecodeWake(payload, []string{w.Outbox}); !ok || got != w {
			t.Fatalf("%+v became %+v, %v", w, got, ok)
		}
	})
}
