package storagetest

import (
	"context"
	"errors"

	"github.com/gormoutbox/outbox/engine"
)

var claimTests = []test{
	{"a lane has one owner", claimExclusive},
	{"ownership ends with the claim", claimEnds},
	{"a settlement is committed when the claim ends well", claimCommits},
	{"a settlement is dropped when the claim ends badly", claimDrops},
	{"a panic passes through and drops the settlement", claimPanics},
	{"fetch records the settlement before it", claimSettlesFirst},
	{"an ended context ends the claim", claimContext},
	{"a settlement that cannot be recorded is handed back", claimSettleError},
	{"a claim that owns its lane is alive", claimAlive},
}

var errFailed = errors.New("failed on purpose")

func claimExclusive(f *fixture) {
	f.SetPartitions(f.T, Orders, 2)
	owned := engine.Lane{Outbox: Orders, Partition: 1, Partitions: 2}
	err := f.claim(owned, func(context.Context, engine.Claim, engine.Page) error {
		for _, storage := range []engine.Storage{f.Storage, f.Peer} {
			if err := fetchOnce(f, storage, owned); !errors.Is(err, engine.ErrBusy) {
				f.Errorf("fetch from an owned lane = %v, want ErrBusy", err)
			}
			free := engine.Lane{Outbox: Orders, Partition: 0, Partitions: 2}
			f.must("fetch from another lane", fetchOnce(f, storage, free))
			other := engine.Lane{Outbox: Mails, Partition: 0, Partitions: 1}
			f.must("fetch from another outbox", fetchOnce(f, storage, other))
		}
		return nil
	})
	f.must("claim", err)
}

func fetchOnce(f *fixture, storage engine.Storage, lane engine.Lane) error {
	return storage.WithPartition(f.ctx, lane, func(ctx context.Context, c engine.Claim) error {
		q := query()
		_, err := c.Fetch(ctx, q)
		return err
	})
}

func claimEnds(f *fixture) {
	for _, result := range []error{nil, errFailed} {
		err := f.claim(lane, func(context.Context, engine.Claim, engine.Page) error { return result })
		if !errors.Is(err, result) {
			f.Errorf("claim = %v, want %v", err, result)
		}
		f.must("fetch after the claim", fetchOnce(f, f.Peer, lane))
	}
	// A claim that found the lane busy does not free it when it ends.
	err := f.claim(lane, func(context.Context, engine.Claim, engine.Page) error {
		_ = fetchOnce(f, f.Peer, lane)
		return fetchOnce(f, f.Peer, lane)
	})
	if !errors.Is(err, engine.ErrBusy) {
		f.Errorf("second fetch from an owned lane = %v, want ErrBusy", err)
	}
}

func claimCommits(f *fixture) {
	f.add(messages("g", "a", "b")...)
	f.must("claim", f.claim(lane, func(_ context.Context, c engine.Claim, page engine.Page) error {
		c.Settle(engine.Settlement{Delivered: ids(page.Envelopes[:1])})
		return nil
	}))
	f.wantTypes(f.peek(lane, query()), "b")
}

func claimDrops(f *fixture) {
	f.add(messages("g", "a", "b")...)
	err := f.claim(lane, func(_ context.Context, c engine.Claim, page engine.Page) error {
		c.Settle(engine.Settlement{Delivered: ids(page.Envelopes)})
		return errFailed
	})
	if !errors.Is(err, errFailed) {
		f.Errorf("claim = %v, want the function's error", err)
	}
	f.wantTypes(f.peek(lane, query()), "a", "b")
}

func claimPanics(f *fixture) {
	f.add(message("g", "a"))
	func() {
		defer func() {
			if got, _ := recover().(error); !errors.Is(got, errFailed) {
				f.Errorf("recovered %v, want what was thrown", got)
			}
		}()
		_ = f.claim(lane, func(_ context.Context, c engine.Claim, page engine.Page) error {
			c.Settle(engine.Settlement{Delivered: ids(page.Envelopes)})
			panic(errFailed)
		})
	}()
	f.must("fetch after the panic", fetchOnce(f, f.Peer, lane))
	f.wantTypes(f.peek(lane, query()), "a")
}

func claimSettlesFirst(f *fixture) {
	f.add(messages("g", "a", "b", "c")...)
	err := f.claim(lane, func(ctx context.Context, c engine.Claim, page engine.Page) error {
		c.Settle(engine.Settlement{Delivered: ids(page.Envelopes[:2])})
		f.add(message("g", "d"))
		page, err := c.Fetch(ctx, query())
		f.must("second fetch", err)
		f.wantTypes(page, "c", "d")
		return errFailed // what the fetch recorded stays
	})
	if !errors.Is(err, errFailed) {
		f.Errorf("claim = %v, want the function's error", err)
	}
	f.wantTypes(f.peek(lane, query()), "c", "d")
}

func claimContext(f *fixture) {
	f.add(message("g", "a"))
	ctx, cancel := context.WithCancel(f.ctx)
	err := f.Storage.WithPartition(ctx, lane, func(ctx context.Context, c engine.Claim) error {
		if _, err := c.Fetch(ctx, query()); err != nil {
			return err
		}
		cancel()
		return ctx.Err()
	})
	if !errors.Is(err, context.Canceled) {
		f.Errorf("claim = %v, want context.Canceled", err)
	}
	f.must("fetch afterwards", fetchOnce(f, f.Peer, lane))
	f.wantTypes(f.peek(lane, query()), "a")
}

// claimSettleError ends the context before the settlement is recorded. A
// storage may record it all the same; if it says that it could not, the
// settlement in the error can be repeated.
func claimSettleError(f *fixture) {
	want := f.add(messages("g", "a", "b")...)
	ctx, cancel := context.WithCancel(f.ctx)
	err := f.Storage.WithPartition(ctx, lane, func(ctx context.Context, c engine.Claim) error {
		page, err := c.Fetch(ctx, query())
		if err != nil {
			return err
		}
		c.Settle(engine.Settlement{Delivered: ids(page.Envelopes)})
		cancel()
		return nil
	})
	if err != nil {
		var settleError *engine.SettleError
		if !errors.As(err, &settleError) {
			f.Fatalf("claim = %v, want a SettleError", err)
		}
		wantEqual(f, "settlement handed back", settleError.Settlement.Delivered, want)
		f.settle(settleError.Settlement)
	}
	f.wantTypes(f.peek(lane, query()))
}

func claimAlive(f *fixture) {
	f.must("claim", f.claim(lane, func(ctx context.Context, c engine.Claim, _ engine.Page) error {
		stop := c.Watch(func() { f.Error("the ownership was reported lost") })
		defer stop()
		done := make(chan error)
		go func() { done <- c.Alive(ctx) }()
		f.must("alive, asked from another goroutine", <-done)
		f.must("alive", c.Alive(ctx))
		return nil
	}))
}
