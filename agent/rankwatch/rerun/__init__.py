"""At a trip: runs again what went bad. Which operator and line made it, does it recur, and in which precision is it finite?"""
