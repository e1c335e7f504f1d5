package listener_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gormoutbox/outbox/engine"
	"github.com/gormoutbox/outbox/listener"
)

// C28
func TestNotifierComesBackWithAFreshConnection(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, b *bundle) {
		b.expect(t, engine.Push)
		for i := range 3 {
			b.recorded()
			b.server.terminate()
			b.expect(t, engine.Degraded)
			time.Sleep(2 * time.Second)
			b.expect(t, engine.Push)
			if got, want := b.recorded(), []string{"connect", "listen", "all"}; !slices.Equal(got, want) {
				t.Errorf("after drop %d: %v, want %v", i+1, got, want)
			}
		}
		if b.dials() < 4 { // and the cancel requests of pgx
			t.Errorf("%d dials", b.dials())
		}
	})
}

// C29
func TestNotifierFindsAHalfOpenConnection(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, b *bundle) {
		b.expect(t, engine.Push)
		b.recorded()
		b.server.freeze()
		time.Sleep(30*time.Second + 5*time.Second + time.Second) // the next test, its timeout, the reconnect
		b.expect(t, engine.Push)
		if got, want := b.recorded(), []string{"connect", "listen", "all"}; !slices.Equal(got, want) {
			t.Errorf("after the connection froze: %v, want %v", got, want)
		}
		if got := len(b.server.connections()); got != 1 {
			t.Errorf("%d connections are open", got)
		}
		if got := b.warnings(); len(got) != 1 {
			t.Errorf("warnings: %v", got)
		}
	})
}

// C30
func TestNotifierWakesEverythingAfterEachListen(t *testing.T) {
	inBubble(t, func(_ *bundle, cfg *listener.Config) {
		cfg.Channels = func(context.Context) ([]string, error) { return []string{"a", "b", "a", "c"}, nil }
	}, func(t *testing.T, b *bundle) {
		for range 5 {
			time.Sleep(time.Minute)
			b.expect(t, engine.Push)
			b.server.terminate()
		}
		time.Sleep(time.Minute)
		events := b.recorded()
		listens := 0
		for i, e := range events {
			if e != "listen" {
				continue
			}
			listens++
			if i+1 == len(events) || events[i+1] != "all" {
				t.Errorf("LISTEN %d is not followed by a wake of everything: %v", listens, events)
			}
		}
		if listens != 6*3 {
			t.Errorf("%d LISTENs on three channels of six connections", listens)
		}
	})
}

// C31
func TestNotifierBoundsAttemptsAgainstAStandby(t *testing.T) {
	inBubble(t, func(b *bundle, _ *listener.Config) { b.server.refuse = true }, func(t *testing.T, b *bundle) {
		time.Sleep(20 * time.Second)
		b.expect(t, engine.Degraded)
		if n := b.refused(); n < 3 || n > 12 {
			t.Errorf("%d attempts in 20 seconds", n)
		}
		time.Sleep(time.Hour)
		b.expect(t, engine.Degraded)
		if n := b.refused(); n < 120 || n > 250 { // at most 30 s apart, 20 s on average
			t.Errorf("%d attempts in an hour", n)
		}
		if got := b.warnings(); len(got) != 1 {
			t.Errorf("warnings: %v", got)
		}
		if events := b.recorded(); slices.Contains(events, "all") {
			t.Errorf("woken without a LISTEN: %v", events)
		}

		b.server.set(func(s *fakeServer) { s.refuse = false })
		time.Sleep(31 * time.Second)
		b.expect(t, engine.Push)
		b.recorded()
		time.Sleep(time.Hour)
		if got := b.recorded(); len(got) != 0 {
			t.Errorf("after the recovery: %v", got)
		}
	})
}

// C31: synchronized reconnects
func TestNotifierSpreadsReconnects(t *testing.T) {
	t.Parallel()
	times := map[time.Duration]bool{}
	for range 20 {
		synctest.Test(t, func(t *testing.T) {
			b := &bundle{server: &fakeServer{down: true}}
			begin := time.Now()
			attempts := 0
			ctx, cancel := context.WithCancel(t.Context())
			n, err := listener.NewNotifier(listener.Config{
				Channels: func(context.Context) ([]string, error) { return []string{"outbox"}, nil },
				Connect: func(ctx context.Context) (*pgx.Conn, error) {
					if attempts++; attempts == 12 {
						times[time.Since(begin).Round(time.Second)] = true
						cancel()
					}
					return b.server.connect(ctx)
				},
				Notify: b.server.notify, Outboxes: []string{"orders"},
			})
			if err != nil {
				t.Fatal(err)
			}
			if err := n.Listen(ctx, func(engine.Wake) {}); !errors.Is(err, context.Canceled) {
				t.Errorf("Listen returned %v", err)
			}
		})
	}
	if len(times) < 8 {
		t.Errorf("the twelfth attempt of twenty nodes comes at %v", times)
	}
}

// C31
func TestNotifierStartsItsBackoffAnewAfterHealth(t *testing.T) {
	inBubble(t, func(b *bundle, _ *listener.Config) { b.server.down = true }, func(t *testing.T, b *bundle) {
		time.Sleep(time.Hour)
		b.server.set(func(s *fakeServer) { s.down = false })
		time.Sleep(2 * time.Minute)
		b.expect(t, engine.Push)
		b.server.terminate()
		b.expect(t, engine.Degraded)
		time.Sleep(time.Second)
		b.expect(t, engine.Push)
	})
}

// C31: a connection that works for a moment is no recovery.
func TestNotifierBoundsFlapping(t *testing.T) {
	inBubble(t, func(b *bundle, cfg *listener.Config) {
		cfg.OnState = func(s engine.PushState) {
			if s == engine.Push {
				go b.server.terminate()
			}
		}
	}, func(t *testing.T, b *bundle) {
		time.Sleep(time.Hour)
		if got := len(b.recorded()); got > 3*400 {
			t.Errorf("%d events in an hour", got)
		}
		if got := b.logs.Len(); got > 2*400 {
			t.Errorf("%d log lines in an hour", got)
		}
		if got := len(b.warnings()); got < 100 {
			t.Errorf("only %d changes of state: nothing flapped", got)
		}
	})
}

// C32
func TestNotifierRecognisesATransactionPooler(t *testing.T) {
	inBubble(t, func(b *bundle, _ *listener.Config) { b.server.pooled = true }, func(t *testing.T, b *bundle) {
		b.expect(t, engine.Degraded)
		time.Sleep(5 * time.Second)
		b.expect(t, engine.Polling)
		time.Sleep(24 * time.Hour)
		b.expect(t, engine.Polling)
		if got := b.warnings(); len(got) != 1 || !strings.Contains(got[0], "pooler") {
			t.Errorf("warnings: %v", got)
		}
		if got := b.dials(); got > 24*10 {
			t.Errorf("%d connections a day", got)
		}
		if events := b.recorded(); slices.Contains(events, "listen") {
			t.Errorf("a LISTEN for wakes went through the pooler: %v", events)
		}

		b.server.set(func(s *fakeServer) { s.pooled = false })
		time.Sleep(10*time.Minute + time.Second)
		b.expect(t, engine.Push)
	})
}

// C32: the pooler comes later.
func TestNotifierRecognisesANewPooler(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, b *bundle) {
		b.expect(t, engine.Push)
		b.server.set(func(s *fakeServer) { s.pooled = true })
		b.server.terminate()
		time.Sleep(time.Minute)
		b.expect(t, engine.Polling)
		if got := b.warnings(); len(got) != 2 {
			t.Errorf("warnings: %v, want one of the drop and one of the pooler", got)
		}
	})
}

func TestNotifierDoesNotBlameTheConnectionForTheApplicationsPool(t *testing.T) {
	var misses atomic.Int32 // to come
	inBubble(t, func(b *bundle, cfg *listener.Config) {
		cfg.Notify = func(ctx context.Context, channel, payload string) error {
			if misses.Add(-1) >= 0 {
				return errors.New("no connection is free")
			}
			return b.server.notify(ctx, channel, payload)
		}
	}, func(t *testing.T, b *bundle) {
		b.expect(t, engine.Push)
		for range 3 {
			misses.Store(2) // is nothing
			time.Sleep(time.Minute)
			b.expect(t, engine.Push)
		}
		if b.logs.Len() != 1 || misses.Load() >= 0 {
			t.Errorf("%d misses to go, log %v", misses.Load(), b.logs.All())
		}
		misses.Store(20)
		time.Sleep(time.Minute)
		b.expect(t, engine.Degraded)
		time.Sleep(10 * time.Minute)
		b.expect(t, engine.Push)
		if got := b.warnings(); len(got) != 1 {
			t.Errorf("warnings: %v", got)
		}
		if b.dials() != 2 {
			t.Errorf("%d connections, want a probe and one that is kept", b.dials())
		}
	})
}

func TestNotifierBoundsTheWayToAListeningConnection(t *testing.T) {
	inBubble(t, func(b *bundle, _ *listener.Config) { b.server.hang = true }, func(t *testing.T, b *bundle) {
		time.Sleep(time.Minute)
		b.expect(t, engine.Degraded)
		connects := 0
		for _, e := range b.recorded() {
			if e == "connect" {
				connects++
			}
		}
		if connects < 3 || connects > 6 {
			t.Errorf("%d attempts in a minute, want a new one about every 15 seconds", connects)
		}
		b.server.set(func(s *fakeServer) { s.hang = false })
		time.Sleep(time.Minute)
		b.expect(t, engine.Push)
	})
}
